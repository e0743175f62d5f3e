"""Needs of a layer group, and the sentence that says which of them a backend lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from quire.config import ModelSpec
from quire.config.kv_layout import KVFormat

__all__ = ["AttentionNeeds"]

_SCORE_WORDS: Mapping[str, str] = MappingProxyType(
    {"soft_cap": "soft-capped scores", "alibi_slopes": "ALiBi", "sinks": "attention sinks"}
)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Dtypes of the queries and the cache, the head shape, and which of the `ScoreOptions` the
    layers of the group have, by name.

    value_dim: elements per head of V, if they are not `head_dim` as those of K. last_key: whether
    queries see keys after their own position.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    scores: frozenset[str] = frozenset()
    value_dim: int | None = None
    last_key: bool = False

    @classmethod
    def of_group(cls, spec: ModelSpec, kv: KVFormat, cache_dtype: torch.dtype) -> AttentionNeeds:
        """Needs of the layers of a model whose cache has the format `kv`."""
        return cls(
            getattr(torch, spec.dtype),
            cache_dtype,
            kv.key_dim,
            spec.num_heads,
            kv.num_kv_heads,
            spec.score_options,
            None if kv.value_dim == kv.key_dim else kv.value_dim,
            last_key=spec.looks_ahead,
        )

    def refused_shape(self) -> str | None:
        """A reason for users if K and V differ in width or queries see later keys; else None. For
        backends that do neither."""
        if self.value_dim is not None:
            return self.refused_widths()
        return self.refused_last_key() if self.last_key else None

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

    def refused_widths(self) -> str:
        """A reason for users: K and V must have one width."""
        return f"it takes K and V of one width, here they have {self.head_dim} and {self.value_dim}"

    def refused_last_key(self) -> str:
        """A reason for users: attention is causal."""
        return "it has no bidirectional attention"

    def refused_scores(self, lacking: frozenset[str]) -> str:
        """A reason for users: `lacking` of `ScoreOptions` are not served."""
        return f"it has no {' and no '.join(_SCORE_WORDS[name] for name in sorted(lacking))}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
