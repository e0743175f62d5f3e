"""Logits to tokens and log-probabilities."""

__all__: list[str] = []
