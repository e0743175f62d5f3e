"""`rescale` by the C++ kernel (csrc/pointwise/pointwise.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.pointwise.rescale`."""
    call = library.call

    def rescale(x: torch.Tensor, factor: float, cap: float | None = None) -> torch.Tensor:
        width = x.shape[-1]
        stride = x.stride(0) if x.dim() == 2 else width
        if x.stride(-1) != 1 or (x.dim() != 2 and not x.is_contiguous()):
            raise EngineError(
                f"rescale takes rows of neighbours, not strides {list(x.stride())}: give a copy"
            )
        if x.numel() > 0:
            call(
                "rescale",
                x.data_ptr(),
                stride,
                x.numel() // width,
                width,
                factor,
                0.0 if cap is None else cap,
                DTYPE_CODES[x.dtype],
            )
        return x

    return rescale
