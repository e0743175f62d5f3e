"""The memory plan, made from sizes alone."""

__all__: list[str] = []
