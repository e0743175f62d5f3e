"""`norm_rows` by the C++ kernel (csrc/norm/norms.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.norm.norm_rows`."""
    call = library.call

    def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rows, width = x.shape
        if x.stride(1) != 1 or weight.shape != (width,) or weight.dtype != x.dtype:
            raise EngineError(
                f"norm_rows takes rows side by side and a weight for each element of them, not "
                f"{x.dtype}{list(x.shape)} with strides {x.stride()} and "
                f"{weight.dtype}{list(weight.shape)}."
            )
        if rows > 0:
            call(
                "norm_rows",
                x.data_ptr(),
                x.stride(0),
                weight.data_ptr(),
                rows,
                width,
                eps,
                DTYPE_CODES[x.dtype],
            )

    return norm_rows
