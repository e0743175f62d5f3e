"""Mixtures of experts."""

__all__: list[str] = []
