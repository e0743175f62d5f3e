"""One run of a server: its ports, fronts, owner and end."""

__all__: list[str] = []
