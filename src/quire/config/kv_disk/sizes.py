"""Sizes of what a slot of a disk's file holds."""

from __future__ import annotations

from typing import NamedTuple

from quire.config.kv_layout import KVLayout
from quire.config.model_spec import STATE_ALIGNMENT, ModelSpec
from quire.config.shard import Shard

__all__ = ["STATE_PART_BYTES", "StoredSizes", "stored_sizes"]

STATE_PART_BYTES = 2**20
"""Bytes of a part of a state, at most, where there are no blocks that it could be as long as."""


class StoredSizes(NamedTuple):
    """Payload of one rank. block_bytes: bytes of a block, or of a part of a state if no layer has
    K and V. num_state_parts: number of parts of a recurrent state, each as long as a block; 0
    without states."""

    block_bytes: int
    num_state_parts: int


def stored_sizes(spec: ModelSpec, layout: KVLayout, num_ranks: int) -> StoredSizes:
    """Return the sizes for a model. layout: layout of all ranks together, which have equal parts.
    A rank may pad its share of each layer's state to a cache line."""
    own = layout.of_rank(Shard(0, num_ranks))
    num_states = len(spec.states) + len(spec.wide_states)
    padding = num_states * STATE_ALIGNMENT if num_ranks > 1 else 0
    state_bytes = own.state_bytes + padding
    block_bytes = own.page_bytes or min(state_bytes, STATE_PART_BYTES)
    return StoredSizes(block_bytes, -(-state_bytes // max(block_bytes, 1)))
