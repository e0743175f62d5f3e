"""Texts that people type, and who continues or answers them."""
