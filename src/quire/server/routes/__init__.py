"""The routes, and the parts of the server that they use."""

__all__: list[str] = []
