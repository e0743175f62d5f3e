"""How a model's layers share the KV pool: layer groups whose pages all have one byte size.

Blocks are named per layer group. A model whose layers are all alike has one group. A model that
mixes full attention and sliding windows has several groups of equally many layers, so that a page
(one block of every layer of a group) has the same size in each and one pool serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quire.config.model_spec import DTYPE_BYTES

__all__ = ["KV_DTYPES", "KVGroup", "KVLayout", "group_layers", "max_blocks"]

KV_DTYPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {**{name: (size, 0) for name, size in DTYPE_BYTES.items()}, "int8": (1, 4)}
)
"""Bytes of an element, and of the scale that each head of a token has beside its elements."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables.

    layers: model layer indices; layer `layers[j]` lives in plane `j` of the pool.
    window: tokens that a query sees, itself included; None is full attention.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """groups: in the order of their first layers. num_planes: layers per page.

    The pool is one tensor of bytes [num_planes, 2 (K, V), B, S, token_bytes]. dtype_bytes,
    scale_bytes: as in KV_DTYPES."""

    groups: tuple[KVGroup, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    scale_bytes: int = 0

    @property
    def num_planes(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one group, over all of its layers."""
        return self.num_planes * self.block_size * 2 * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one layer. Scales follow the elements, aligned."""
        elements = self.num_kv_heads * self.head_dim * self.dtype_bytes
        if not self.scale_bytes:
            return elements
        aligned = -(-elements // self.scale_bytes) * self.scale_bytes
        return aligned + self.num_kv_heads * self.scale_bytes

    def blocks_for(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that one sequence of `num_tokens` holds at once, over all groups, when a
        step adds at most `max_step_tokens` of them.
        See `max_blocks`."""
        windows = [group.window for group in self.groups]
        return max_blocks(windows, self.block_size, num_tokens, max_step_tokens)


def max_blocks(
    windows: Iterable[int | None], block_size: int, num_tokens: int, max_step_tokens: int
) -> int:
    """`KVLayout.blocks_for` of groups with these windows.

    A sliding group keeps the window of the oldest query of a step, so it may hold
    window - 1 + max_step_tokens tokens, wherever these start within a block.
    """
    total = 0
    whole = -(-num_tokens // block_size)
    for window in windows:
        if window is None:
            total += whole
        else:
            span = window - 1 + max_step_tokens
            total += min(whole, (span + block_size - 2) // block_size + 1)
    return total


def group_layers(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Partition layers by window into groups of at most the smallest kind's size.

    windows: per layer, the window or None. A kind with more layers than the smallest kind is
    split, so every page has the same byte size and little of it is padding.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    groups = [
        KVGroup(tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))
