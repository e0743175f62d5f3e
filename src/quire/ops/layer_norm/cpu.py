"""`layer_norm` and `add_layer_norm` by the C++ kernel (csrc/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.cpu_provider import paired_rows, pointer, strided_rows
from quire.ops.native import DTYPE_CODES, NativeLibrary

__all__ = ["bind", "bind_with_residual"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`layer_norm` on `library`; contract in `quire.ops.layer_norm`."""
    call = library.call

    def layer_norm(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x, (outer, inner), strides = strided_rows(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call(
            "layer_norm",
            x.data_ptr(),
            *strides,
            None,
            0,
            0,
            pointer(weight),
            pointer(bias),
            out.data_ptr(),
            None,
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out

    return layer_norm


def bind_with_residual(
    library: NativeLibrary,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`add_layer_norm` on `library`; contract in `quire.ops.add_layer_norm`."""
    call = library.call

    def add_layer_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, sizes, x_strides, residual_strides = paired_rows(x, residual)
        outer, inner = sizes
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = torch.empty_like(out)
        call(
            "layer_norm",
            x.data_ptr(),
            *x_strides,
            residual.data_ptr(),
            *residual_strides,
            pointer(weight),
            pointer(bias),
            out.data_ptr(),
            total.data_ptr(),
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out, total

    return add_layer_norm
