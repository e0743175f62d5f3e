"""`rope_and_write_kv` by the C++ kernel (csrc/kv/rope_and_write_kv.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import CACHE_DTYPE_CODES, DTYPE_CODES, page_strides, pointer

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.kv.rope_and_write_kv`."""
    call = library.call

    def rope_and_write_kv(
        qkv: torch.Tensor,
        num_heads: int,
        positions: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        call(
            "rope_and_write_kv",
            qkv.data_ptr(),
            qkv.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            positions.data_ptr(),
            pointer(cos),
            pointer(sin),
            0 if cos is None else cos.shape[-1],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            pointer(k_scale),
            pointer(v_scale),
            slot_mapping.data_ptr(),
            qkv.shape[0],
            block_size,
            *page_strides(k_cache, k_scale),
            pointer(q_weight),
            pointer(k_weight),
            eps,
            DTYPE_CODES[qkv.dtype],
            CACHE_DTYPE_CODES[k_cache.dtype],
        )

    return rope_and_write_kv
