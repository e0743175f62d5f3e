"""Readings for people: a view of one moment (`view`)."""

__all__: list[str] = []
