"""Recurrent states: places in prompts where they are worth it (`places`), and steps that keep them
(`kept`)."""

__all__: list[str] = []
