"""Contents of the pages of a KV cache: elements of one dtype and, with int8, their scales.

A page has a segment of [S, token_bytes] bytes for each plane (K, V) of each layer. A token is K · D
elements. In an int8 cache the K float32 scales of its heads follow, at the next multiple of 4
bytes: element · scale is the value. A plane that K and V share has two scales (K = 1): one of the
elements of V, which come first, and one of the others. So code that copies, shares or counts pages
need not know about scales.
"""

from __future__ import annotations

import torch

from quire.config.kv_layout import KV_DTYPES, KVFormat

__all__ = ["EMPTY_BYTE", "empty_cache", "page_views"]

EMPTY_BYTE = 0xFF
"""A byte for filling pages: they become NaN in every float dtype, and so do the scales of an int8
cache."""

_SCALE_BYTES = 4


def page_views(
    pages: torch.Tensor, dtype: torch.dtype, kv_format: KVFormat, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of the pages of a plane, uint8 [..., S, token_bytes]: elements [..., S, K, D] of
    `dtype` and, of an int8 cache, scales float32 [..., S, num_scales]."""
    num_kv_heads = kv_format.num_kv_heads
    heads = (num_kv_heads, head_dim)
    elements = pages[..., : num_kv_heads * head_dim * dtype.itemsize].view(dtype)
    if dtype != torch.int8:
        return elements.unflatten(-1, heads), None
    scales = pages[..., -kv_format.num_scales * _SCALE_BYTES :].view(torch.float32)
    return elements.unflatten(-1, heads), scales


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    value_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return K or V of one layer, [B, S, K, D], and its scales, in pages full of NaN. value_dim:
    elements of V in a plane that both share, None for a plane of one of them."""
    sizes = KV_DTYPES[str(dtype).removeprefix("torch.")]
    planes = 2 if value_dim is None else 1
    kv_format = KVFormat(num_kv_heads, head_dim, value_dim or head_dim, *sizes, num_planes=planes)
    shape = (num_blocks, block_size, kv_format.token_bytes)
    pages = torch.full(shape, EMPTY_BYTE, dtype=torch.uint8, device=device)
    return page_views(pages, dtype, kv_format, head_dim)
