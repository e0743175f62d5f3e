"""`write_kv` by the C++ kernel (csrc/cache.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.cpu_provider import CACHE_DTYPE_CODES, page_strides, pointer, token_rows
from quire.ops.native import DTYPE_CODES, NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.write_kv`."""
    call = library.call

    def write_kv(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        k, v = token_rows(k), token_rows(v)
        num_tokens, num_kv_heads, head_dim = k.shape
        call(
            "write_kv",
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            pointer(k_scale),
            pointer(v_scale),
            slot_mapping.data_ptr(),
            num_tokens,
            num_kv_heads,
            head_dim,
            k.stride(0),
            v.stride(0),
            k_cache.shape[1],
            *page_strides(k_cache, k_scale),
            DTYPE_CODES[k.dtype],
            CACHE_DTYPE_CODES[k_cache.dtype],
        )

    return write_kv
