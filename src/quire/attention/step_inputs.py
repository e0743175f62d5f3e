"""What a forward needs besides tokens and positions; the only carrier of attention metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GroupInputs", "KVPool", "StepInputs"]


@dataclass(frozen=True, slots=True)
class KVPool:
    """The paged KV cache of one device.

    layers: by model layer index, its k_cache and v_cache, each [B, S, K, D]; views that are made
        once, since every layer of every step asks. groups: by layer index, its layer group.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    groups: tuple[int, ...]

    @classmethod
    def over(cls, pages: torch.Tensor, planes: Sequence[int], groups: Sequence[int]) -> KVPool:
        """pages: [L, 2, B, S, K, D], L = layers per group (planes); plane j of a group is its j-th
        layer. planes: by model layer index, the plane that holds it."""
        layers = tuple((pages[plane, 0], pages[plane, 1]) for plane in planes)
        return cls(layers, tuple(groups))


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Attention metadata of one layer group for one step.

    block_table: int32 [R, M]; entry i of a row is the block of its tokens i·S … (i+1)·S - 1.
    slot_mapping: int64 [T]; where token t's K/V go: block · S + offset.
    window: sliding window in tokens, the query itself included, or None.
    plan: what the attention backend prepared for this step and group.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    window: int | None
    plan: Any


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of a flat batch: row r owns tokens query_start_loc[r] … query_start_loc[r+1] - 1.

    query_start_loc: int32 [R + 1]. seq_lens: int32 [R], tokens in the cache after this step's
    writes. max_query_len, max_seq_len: host integers. groups: per layer group.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    groups: tuple[GroupInputs, ...]
    kv: KVPool
