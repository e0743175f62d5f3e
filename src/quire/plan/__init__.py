"""The plan side: decides with integers, and never imports torch."""

__all__: list[str] = []
