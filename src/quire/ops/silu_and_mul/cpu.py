"""`silu_and_mul` by the C++ kernel (csrc/rows.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native import DTYPE_CODES, NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.silu_and_mul`."""
    call = library.call

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
        if out.numel() > 0:
            call(
                "silu_and_mul",
                x.data_ptr(),
                2 * width,
                out.data_ptr(),
                out.numel() // width,
                width,
                DTYPE_CODES[x.dtype],
            )
        return out

    return silu_and_mul
