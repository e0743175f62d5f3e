"""Readings for people: a log of steps (`step_log`), and a view of one moment (`view`)."""

__all__: list[str] = []
