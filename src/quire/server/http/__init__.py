"""Connections, guards, bodies and events of HTTP."""

__all__: list[str] = []
