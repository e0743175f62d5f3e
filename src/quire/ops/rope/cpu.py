"""`rope` by the C++ kernel (csrc/rows.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.errors import EngineError
from quire.ops.native import DTYPE_CODES, NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.rope`."""
    call = library.call

    def rope(
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool = False,
    ) -> None:
        num_tokens, q_heads, head_dim = q.shape
        for x in (q, k):
            if x.stride(-1) != 1 or x.stride(-2) != head_dim:
                raise EngineError(
                    f"rope works in place on contiguous heads, got strides {x.stride()}. "
                    "Pass a view whose last two dimensions are contiguous."
                )
        call(
            "rope",
            q.data_ptr(),
            k.data_ptr(),
            q.stride(0),
            k.stride(0),
            q_heads,
            k.shape[1],
            head_dim,
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            num_tokens,
            interleaved,
            DTYPE_CODES[q.dtype],
        )

    return rope
