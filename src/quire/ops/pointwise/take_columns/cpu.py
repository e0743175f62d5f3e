"""`take_columns` by the C++ kernel (csrc/pointwise/take_columns.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, input_rows, row_ids

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.pointwise.take_columns`."""
    call = library.call

    def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        rows, ids = input_rows(x, x.shape[-1]), row_ids(order)
        out = torch.empty((len(rows), len(ids)), dtype=x.dtype)
        call(
            "take_columns",
            rows.data_ptr(),
            rows.stride(0),
            ids.data_ptr(),
            ids.itemsize,
            out.data_ptr(),
            len(rows),
            x.shape[-1],
            len(ids),
            DTYPE_CODES[x.dtype],
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], len(ids))

    return take_columns
