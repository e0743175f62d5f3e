"""Functions of single elements."""

__all__: list[str] = []
