"""Rows of a step: their updates, inputs and sampled tokens."""

__all__: list[str] = []
