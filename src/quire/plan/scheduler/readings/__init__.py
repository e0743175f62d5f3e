"""Readings for people: a view of one moment (`view`), a log of steps, records of requests."""

__all__: list[str] = []
