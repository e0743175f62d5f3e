"""Measurements, and the facts about a machine without which they mean nothing."""

__all__: list[str] = []
