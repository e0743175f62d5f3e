"""Ways in: the Python APIs, a client of a server, and what the command line runs."""

__all__: list[str] = []
