"""`rotate` by the C++ kernel (csrc/linear/integers/rotate.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.linear.rotate.reference import check_rotation
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, input_rows

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.linear.rotate`."""
    call = library.call

    def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
        depth = x.shape[-1]
        check_rotation(block, depth)
        if block == 1:
            return x
        rows = input_rows(x, depth)
        out = torch.empty(x.shape, dtype=torch.float32)
        if x.numel() > 0:
            call(
                "rotate",
                rows.data_ptr(),
                rows.stride(0),
                out.data_ptr(),
                len(rows),
                depth,
                block,
                DTYPE_CODES[rows.dtype],
            )
        return out

    return rotate
