"""Rooms that all may use: errors, names of other engines, counters, facts of the machine."""

__all__: list[str] = []
