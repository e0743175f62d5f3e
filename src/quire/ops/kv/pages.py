"""Contents of the pages of a KV cache: elements of one dtype and, with int8, their scales.

A page has a segment of [S, token_bytes] bytes for each plane (K, V) of each layer. A token is K · D
elements. In an int8 cache the K float32 scales of its heads follow, at the next multiple of 4
bytes: element · scale is the value. So code that copies, shares or counts pages need not know about
scales.
"""

from __future__ import annotations

import torch

from quire.config.kv_layout import KVFormat

__all__ = ["EMPTY_BYTE", "empty_cache", "page_views"]

EMPTY_BYTE = 0xFF
"""A byte for filling pages: they become NaN in every float dtype, and so do the scales of an int8
cache."""

_SCALE_BYTES = 4


def page_views(
    pages: torch.Tensor, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of pages, uint8 [..., S, token_bytes]: elements [..., S, K, D] of `dtype` and,
    of an int8 cache, scales float32 [..., S, K]."""
    heads = (num_kv_heads, head_dim)
    elements = pages[..., : num_kv_heads * head_dim * dtype.itemsize].view(dtype)
    if dtype != torch.int8:
        return elements.unflatten(-1, heads), None
    scales = pages[..., -num_kv_heads * _SCALE_BYTES :].view(torch.float32)
    return elements.unflatten(-1, heads), scales


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return K or V of one layer, [B, S, K, D], and its scales, in pages full of NaN."""
    kv_format = KVFormat.plain(num_kv_heads, head_dim, str(dtype).removeprefix("torch."))
    shape = (num_blocks, block_size, kv_format.token_bytes)
    pages = torch.full(shape, EMPTY_BYTE, dtype=torch.uint8, device=device)
    return page_views(pages, dtype, num_kv_heads, head_dim)
