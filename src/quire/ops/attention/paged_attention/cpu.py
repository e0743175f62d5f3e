"""`paged_attention` by the C++ kernel (csrc/attention/paged_attention.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.attention.paged_attention.key_bias import KeyBias
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import (
    CACHE_DTYPE_CODES,
    DTYPE_CODES,
    page_strides,
    pointer,
    token_rows,
)

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.attention.paged_attention`."""
    call = library.call

    def paged_attention(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        max_query_len: int | None = None,  # noqa: ARG001  the contract's
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        key_bias: KeyBias | None = None,
        value_bias: torch.Tensor | None = None,
        last_key: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = token_rows(q)
        num_tokens, num_heads, head_dim = q.shape
        _, block_size, num_kv_heads, value_dim = v_cache.shape
        if v_cache.stride()[:2] != k_cache.stride()[:2]:
            raise EngineError(
                f"The kernels take K and V with one stride of blocks and of tokens, not "
                f"{k_cache.stride()} and {v_cache.stride()}."
            )
        out = q.new_empty((num_tokens, num_heads, value_dim))
        call(
            "paged_attention",
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            pointer(k_scale),
            pointer(v_scale),
            out.data_ptr(),
            block_table.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            q.stride(0),
            *page_strides(k_cache, k_scale),
            block_table.stride(0),
            block_size,
            seq_lens.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            num_kv_heads if k_scale is None else k_scale.shape[-1],
            scale,
            window or 0,
            DTYPE_CODES[q.dtype],
            CACHE_DTYPE_CODES[k_cache.dtype],
            *_key_bias(key_bias),
            pointer(value_bias),
            pointer(last_key),
            pointer(sinks),
            soft_cap or 0.0,
            pointer(alibi_slopes),
        )
        return out

    return paged_attention


def _key_bias(bias: KeyBias | None) -> tuple[int | None, ...]:
    """Return the members of `struct KeyBias` in csrc/attention/bias.h."""
    if bias is None:
        return (None,) * 4 + (0,) * 3
    tensors = (bias.pairs, bias.values, bias.cos, bias.sin)
    return (*map(pointer, tensors), len(bias.pairs), *bias.cos.shape)
