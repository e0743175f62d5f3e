"""Attention over the paged KV cache."""

__all__: list[str] = []
