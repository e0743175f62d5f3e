"""HTTP: connections, guards, bodies and events."""

__all__: list[str] = []
