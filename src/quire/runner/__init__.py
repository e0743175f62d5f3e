"""Executes one step on one device."""

__all__: list[str] = []
