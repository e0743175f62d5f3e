"""Store K and V of this step's tokens into the paged cache."""

from __future__ import annotations

import torch

__all__ = ["quantize", "write_kv", "write_plane"]

_INT8_MAX = 127.0


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """k, v: [T, K, D]; the others as in the contract (`quire.ops.kv.rope_and_write_kv`)."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    for x, cache, scales in ((k[kept], k_cache, k_scale), (v[kept], v_cache, v_scale)):
        if scales is None:
            cache[block, offset] = narrow(x, cache.dtype)
        elif cache.dtype != torch.int8:
            scale = scales[block, offset].unsqueeze(-1)
            cache[block, offset] = narrow(x.float() / scale, cache.dtype)
        else:
            cache[block, offset], scales[block, offset] = quantize(x.float())


def write_plane(
    rows: torch.Tensor,
    value_dim: int,
    plane: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Store rows [T, K, D] in a plane [B, S, K, D] that K and V share. value_dim: elements of V,
    the first ones. scale: float32 [B, S, 2] of an int8 plane, of these elements and of the
    others."""
    of_value, of_rest = (None, None) if scale is None else (scale[..., :1], scale[..., 1:])
    value, rest = rows[..., :value_dim], rows[..., value_dim:]
    places = plane[..., :value_dim], plane[..., value_dim:]
    write_kv(value, rest, *places, slot_mapping, of_value, of_rest)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in `dtype`. Numbers beyond the range of an 8-bit dtype become its largest; NaN
    stays."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., D] → int8 [..., D] and scales float32 [...]."""
    scale = x.abs().amax(dim=-1) / _INT8_MAX
    usable = scale.isfinite() & (scale >= torch.finfo(torch.float32).tiny)
    inverse = torch.where(usable, 1.0 / scale, 0.0).unsqueeze(-1)
    elements = torch.where(usable.unsqueeze(-1), (x * inverse).round(), 0.0)
    broken = torch.where(x.isfinite().all(dim=-1), 0.0, float("nan"))
    return elements.to(torch.int8), torch.where(usable, scale, broken)
