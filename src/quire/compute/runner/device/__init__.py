"""Parts for a device with its own memory: a copy of the rows, and the order of work."""

__all__: list[str] = []
