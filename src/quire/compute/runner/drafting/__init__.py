"""Drafts made where the model computes, by a draft model or by heads on its hidden states."""

__all__: list[str] = []
