"""Recurrent states: places in prompts where they are worth keeping (`places`), and steps that keep
them (`kept`)."""

__all__: list[str] = []
