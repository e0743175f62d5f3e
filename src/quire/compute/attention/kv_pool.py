"""The paged KV cache of one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from quire.config.kv_layout import KVGroup, KVLayout
from quire.ops.kv.pages import page_views
from quire.ops.native.huge_pages import map_huge_pages

__all__ = ["KVPool", "LayerCache"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache of one layer: k [B, S, K, Dk], v [B, S, K, Dv], which of a latent group is the first
    part of k. Scales: float32 [B, S, K] of an int8 cache; of one in float8 views of one number,
    where it is not 1; else None (`quire.ops.kv.rope_and_write_kv`). In a latent group k_scale is
    [B, S, 2], of the elements of v and of the others, and v_scale is its first part."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def without_heads(self) -> LayerCache:
        """The same pages with no kv head, into which nothing is written."""
        scales = (
            None if scale is None else scale[:, :, :0] for scale in (self.k_scale, self.v_scale)
        )
        return LayerCache(self.k[:, :, :0], self.v[:, :, :0], *scales)


@dataclass(frozen=True, slots=True)
class KVPool:
    """pages: uint8 [N, B, segment_bytes] (`KVLayout`). layers: views of the pages, indexed by model
    layer. They are made once, since every layer of every step asks. groups: layer group of each
    layer, by its index."""

    pages: torch.Tensor
    layers: Mapping[int, LayerCache]
    groups: Mapping[int, int]

    @classmethod
    def allocate(
        cls, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """Pages that nobody initialises: unwritten parts are never read.

        On a CPU they lie in the system's huge pages where it has them, since decode streams
        through the pool. Memory is used from the first write on, then 2 MiB at once and not the
        written block alone; the memory plan counts the whole pool anyway.
        """
        shape = (layout.num_segments, num_blocks, layout.segment_bytes)  # empty without K/V
        if device.type == "cpu":
            size = math.prod(shape)
            pages = map_huge_pages(size)[:size].view(shape)
        else:
            pages = torch.empty(shape, dtype=torch.uint8, device=device)
        layers: dict[int, LayerCache] = {}
        groups: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            planes = group.kv.format.num_planes
            for place, layer in enumerate(group.layers):
                segments = pages[place * planes : (place + 1) * planes]
                layers[layer] = _layer_cache(segments, group, dtype)
                groups[layer] = index
        return cls(pages, layers, groups)

    def scaled(self, scales: Mapping[int, tuple[float, float]]) -> KVPool:
        """The same pool, whose K and V are divided by these numbers of their layer."""
        layers = dict(self.layers)
        for layer, (k_scale, v_scale) in scales.items():
            if (k_scale, v_scale) != (1.0, 1.0):  # layers without K/V have no other
                cache = layers[layer]
                layers[layer] = replace(
                    cache,
                    k_scale=_one_scale(cache.k, k_scale),
                    v_scale=_one_scale(cache.v, v_scale),
                )
        return replace(self, layers=layers)


def _one_scale(cache: torch.Tensor, scale: float) -> torch.Tensor:
    """One number seen as those of all heads of all tokens: [B, S, K]."""
    number = torch.tensor(scale, dtype=torch.float32, device=cache.device)
    return number.expand(cache.shape[:3])


def _layer_cache(segments: torch.Tensor, group: KVGroup, dtype: torch.dtype) -> LayerCache:
    """Views of the segments [planes, B, segment_bytes] of one layer."""
    kv = group.kv.format
    filled = group.tokens_per_block * kv.token_bytes
    tokens = segments[..., :filled].unflatten(-1, (group.tokens_per_block, kv.token_bytes))
    k, k_scale = page_views(tokens[0], dtype, kv, kv.key_dim)
    if kv.num_planes == 1:
        v_scale = None if k_scale is None else k_scale[..., : kv.num_kv_heads]
        return LayerCache(k, k[..., : kv.value_dim], k_scale, v_scale)
    v, v_scale = page_views(tokens[1], dtype, kv, kv.value_dim)
    return LayerCache(k, v, k_scale, v_scale)
