"""Norms over the last dimension, with and without a residual."""

__all__: list[str] = []
