"""Conversations that the server keeps between their turns."""

__all__: list[str] = []
