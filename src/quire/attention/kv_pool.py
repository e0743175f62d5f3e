"""The paged KV cache of one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config.kv_layout import KVLayout
from quire.ops.kv_pages import page_views

__all__ = ["KVPool", "LayerCache"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer reads and writes: k, v [B, S, K, D]. Scales: float32 [B, S, K] of an int8
    cache, else None (`quire.ops.rope_and_write_kv`)."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class KVPool:
    """pages: uint8 [L, 2 (K, V), B, S, token_bytes], L = layers per group (planes); plane j of a
    group is its j-th layer. layers: by model layer index, views of the pages that are made once,
    since every layer of every step asks. groups: by layer index, its layer group.
    """

    pages: torch.Tensor
    layers: tuple[LayerCache, ...]
    groups: tuple[int, ...]

    @classmethod
    def allocate(
        cls, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """Pages that are not initialised: what was not written is never read."""
        shape = (layout.num_planes, 2, num_blocks, layout.block_size, layout.token_bytes)
        pages = torch.empty(shape, dtype=torch.uint8, device=device)
        elements, scales = page_views(pages, dtype, layout.num_kv_heads, layout.head_dim)
        layers: dict[int, LayerCache] = {}
        groups: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            for plane, layer in enumerate(group.layers):
                k, v = elements[plane]
                k_scale, v_scale = (None, None) if scales is None else scales[plane]
                layers[layer] = LayerCache(k, v, k_scale, v_scale)
                groups[layer] = index
        order = range(len(layers))
        return cls(pages, tuple(layers[i] for i in order), tuple(groups[i] for i in order))
