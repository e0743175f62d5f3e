"""`rescale_rows` by the C++ kernel (csrc/pointwise/rescale_rows.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, pointer, row_ids

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.pointwise.rescale_rows`."""
    call = library.call

    def rescale_rows(
        x: torch.Tensor, factors: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.dtype != factors.dtype or not x[:1].is_contiguous():
            raise EngineError(
                f"rescale_rows takes contiguous rows of the factors' dtype, not {x.dtype} with "
                f"strides {list(x.stride())} and {factors.dtype}"
            )
        if index is not None and index.shape != x.shape[:1]:
            raise EngineError(
                f"rescale_rows takes one index for each of {len(x)} rows, not {list(index.shape)}"
            )
        ids = None if index is None else row_ids(index)
        if x.numel() > 0:
            call(
                "rescale_rows",
                x.data_ptr(),
                x.stride(0),
                len(x),
                x[0].numel(),
                factors.data_ptr(),
                len(factors),
                pointer(ids),
                8 if ids is None else ids.itemsize,
                DTYPE_CODES[x.dtype],
            )
        return x

    return rescale_rows
