"""`write_latent` by the C++ kernel (csrc/kv/write_latent.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import CACHE_DTYPE_CODES, DTYPE_CODES, page_strides, pointer

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.kv.write_latent`."""
    call = library.call

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
        _, heads, width = queries.shape
        half, size = cos.shape[1], len(weight)
        if size + 2 * half != width or rotated.shape[1] != 2 * half * heads:
            raise EngineError(
                f"write_latent takes heads of {size} + {2 * half} elements, not "
                f"{list(queries.shape)} with {list(rotated.shape)}."
            )
        if cache.dtype not in CACHE_DTYPE_CODES:
            raise EngineError(f"write_latent takes no cache in {cache.dtype}.")
        block_stride, token_stride, *scale_strides = page_strides(cache, scale)
        call(
            "write_latent",
            queries.data_ptr(),
            queries.stride(0),
            rotated.data_ptr(),
            rotated.stride(0),
            heads,
            latent.data_ptr(),
            latent.stride(0),
            weight.data_ptr(),
            size,
            eps,
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            half,
            cache.data_ptr(),
            slot_mapping.data_ptr(),
            len(latent),
            cache.shape[1],
            block_stride,
            token_stride,
            pointer(scale),
            *scale_strides,
            DTYPE_CODES[latent.dtype],
            CACHE_DTYPE_CODES[cache.dtype],
        )

    return write_latent
