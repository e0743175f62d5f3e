"""What a model asks of attention, and how it is said that a backend does not have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

__all__ = ["AttentionNeeds"]

_SCORE_WORDS: Mapping[str, str] = MappingProxyType(
    {"soft_cap": "soft-capped scores", "alibi_slopes": "ALiBi", "sinks": "attention sinks"}
)


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

    def refused_dtype(self) -> str:
        """A reason for users: the backend has no kernels for `dtype`."""
        return f"it does not compute in {_word(self.dtype)}"

    def refused_cache(self) -> str:
        """A reason for users: the backend cannot read `cache_dtype` for `dtype`."""
        model, cache = _word(self.dtype), _word(self.cache_dtype)
        return f"it reads no KV cache in {cache} for a model in {model}"

    def refused_heads(self, taken: str) -> str:
        """A reason for users. taken: the sizes of heads that the backend takes, in words."""
        return f"it takes heads of {taken} elements, the model's have {self.head_dim}"

    def refused_scores(self, lacking: frozenset[str]) -> str:
        """A reason for users: `lacking` of `ScoreOptions` are not served."""
        return f"it has no {' and no '.join(_SCORE_WORDS[name] for name in sorted(lacking))}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
