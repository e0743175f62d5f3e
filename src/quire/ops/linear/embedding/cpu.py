"""`embedding` by the C++ kernel (csrc/linear/embedding.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import row_ids

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.linear.embedding`."""
    call = library.call

    def embedding(ids: torch.Tensor, weight: torch.Tensor, offset: int = 0) -> torch.Tensor:
        if weight.dim() != 2 or not weight.is_contiguous():
            raise EngineError(
                f"embedding takes a contiguous table of rows, not {list(weight.shape)} with "
                f"strides {weight.stride()}."
            )
        ids = row_ids(ids)
        num_rows, width = weight.shape
        out = torch.empty((*ids.shape, width), dtype=weight.dtype)
        call(
            "embedding",
            ids.data_ptr(),
            ids.itemsize,
            offset,
            weight.data_ptr(),
            out.data_ptr(),
            ids.numel(),
            num_rows,
            width * weight.itemsize,
        )
        return out

    return embedding
