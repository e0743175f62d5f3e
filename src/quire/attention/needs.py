"""What a model asks of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionNeeds"]


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Dtypes of the queries and the cache, the head shape, and which of the `ScoreOptions` its
    layers have, by name."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    scores: frozenset[str] = frozenset()
