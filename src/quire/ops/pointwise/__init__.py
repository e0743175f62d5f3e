"""Functions of each element alone."""

__all__: list[str] = []
