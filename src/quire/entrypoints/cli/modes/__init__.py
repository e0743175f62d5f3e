"""Modes of commands that have modules of their own."""

__all__: list[str] = []
