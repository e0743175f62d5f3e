"""Calls the kernels of norms (csrc/norm/norms.cpp). All take the same rows, and a residual that may
be added first."""

from __future__ import annotations

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, paired_rows, pointer, strided_rows

__all__ = ["NormKernel"]


class NormKernel:
    """One of the kernels. parameters: its tensors [N], None where the norm has none."""

    def __init__(self, library: NativeLibrary, name: str) -> None:
        self._call = library.call
        self._name = name

    def norm(
        self, x: torch.Tensor, parameters: tuple[torch.Tensor | None, ...], eps: float
    ) -> torch.Tensor:
        """x [..., N] → normed, like x and newly allocated."""
        x, (outer, inner), strides = strided_rows(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._call(
            self._name,
            x.data_ptr(),
            *strides,
            None,
            0,
            0,
            *map(pointer, parameters),
            out.data_ptr(),
            None,
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out

    def add_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        parameters: tuple[torch.Tensor | None, ...],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [..., N] → (normed, total), like x and newly allocated."""
        x, residual, (outer, inner), x_strides, residual_strides = paired_rows(x, residual)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = torch.empty_like(out)
        self._call(
            self._name,
            x.data_ptr(),
            *x_strides,
            residual.data_ptr(),
            *residual_strides,
            *map(pointer, parameters),
            out.data_ptr(),
            total.data_ptr(),
            outer,
            inner,
            x.shape[-1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out, total
