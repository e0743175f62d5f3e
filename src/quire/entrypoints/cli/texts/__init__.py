"""Texts that people type, and who continues or answers them."""

__all__: list[str] = []
