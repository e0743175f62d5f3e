"""`rms_norm` and `add_rms_norm` by the C++ kernel (csrc/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.cpu_provider import paired_rows, strided_rows
from quire.ops.native import DTYPE_CODES, NativeLibrary

__all__ = ["bind", "bind_with_residual"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`rms_norm` on `library`; contract in `quire.ops.rms_norm`."""
    call = library.call

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, (outer, inner), strides = strided_rows(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call(
            "rms_norm",
            x.data_ptr(),
            *strides,
            None,
            0,
            0,
            weight.data_ptr(),
            out.data_ptr(),
            None,
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out

    return rms_norm


def bind_with_residual(
    library: NativeLibrary,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`add_rms_norm` on `library`; contract in `quire.ops.add_rms_norm`."""
    call = library.call

    def add_rms_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, sizes, x_strides, residual_strides = paired_rows(x, residual)
        outer, inner = sizes
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = torch.empty_like(out)
        call(
            "rms_norm",
            x.data_ptr(),
            *x_strides,
            residual.data_ptr(),
            *residual_strides,
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out, total

    return add_rms_norm
