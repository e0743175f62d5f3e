"""Norm, rotation and the write to the cache, one after the other."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.ops.kv.rope_and_write_kv.rope import rope
from quire.ops.kv.rope_and_write_kv.write_kv import write_plane
from quire.ops.norm.rms_norm.reference import rms_norm

__all__ = ["write_latent"]


def write_latent(
    queries: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Shapes as in the contract (`quire.ops.kv.write_latent`)."""
    if cache.dtype.itemsize == 1 and scale is None:
        raise EngineError(f"write_latent takes no cache in {cache.dtype}.")
    size = len(weight)
    latent[:, :size] = rms_norm(latent[:, :size], weight, eps)
    heads = queries[..., size:]
    heads.copy_(rotated.unflatten(-1, heads.shape[1:]))
    rope(heads, latent[:, None, size:], positions, cos, sin)
    write_plane(latent.unsqueeze(1), size, cache, slot_mapping, scale)
