"""`add` by the C++ kernel (csrc/pointwise/pointwise.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.pointwise.add`."""
    call = library.call

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape != y.shape or x.dtype != y.dtype:
            raise EngineError(
                f"add takes two tensors of one shape and dtype, not {x.dtype}{list(x.shape)} and "
                f"{y.dtype}{list(y.shape)}."
            )
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        if x.numel() > 0:
            call(
                "add",
                x.data_ptr(),
                y.data_ptr(),
                out.data_ptr(),
                x.numel(),
                DTYPE_CODES[x.dtype],
            )
        return out

    return add
