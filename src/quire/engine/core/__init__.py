"""The engine core, its loop, and its end of the sockets to clients."""

__all__: list[str] = []
