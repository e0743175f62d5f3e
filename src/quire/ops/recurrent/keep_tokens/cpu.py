"""`keep_tokens` by the C++ kernel (csrc/recurrent/keep_tokens.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.recurrent.keep_tokens`."""
    call = library.call

    def keep_tokens(
        x: torch.Tensor,
        kept: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        keep: torch.Tensor,
    ) -> None:
        if x.dtype != kept.dtype or x.shape[1] != kept.shape[1]:
            raise EngineError(
                f"keep_tokens was given x {x.dtype} {list(x.shape)} for {kept.dtype} "
                f"{list(kept.shape)}"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        size = x.dtype.itemsize
        call(
            "keep_tokens",
            x.data_ptr(),
            x.stride(0) * size,
            kept.shape[1] * size,
            kept.data_ptr(),
            kept.stride(0) * size,
            kept.shape[0],
            slots.data_ptr(),
            len(slots),
            starts.data_ptr(),
            keep.data_ptr(),
        )

    return keep_tokens
