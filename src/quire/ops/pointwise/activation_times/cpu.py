"""`activation_times` by the C++ kernel (csrc/pointwise/pointwise.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES
from quire.ops.pointwise.activation.cpu import factor_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.pointwise.activation_times`."""
    call = library.call

    def activation_times(x: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        code = factor_code(kind)
        if x.shape != up.shape or x.dtype != up.dtype or (x.stride(-1), up.stride(-1)) != (1, 1):
            raise EngineError(
                "activation_times takes rows of neighbours of one shape and dtype, not "
                f"{x.dtype}{list(x.shape)} and {up.dtype}{list(up.shape)}"
            )
        out = torch.empty(x.shape, dtype=x.dtype)
        if out.numel() > 0:
            call(
                "activation_times",
                x.data_ptr(),
                x.stride(0),
                up.data_ptr(),
                up.stride(0),
                out.data_ptr(),
                *x.shape,
                code,
                DTYPE_CODES[x.dtype],
            )
        return out

    return activation_times
