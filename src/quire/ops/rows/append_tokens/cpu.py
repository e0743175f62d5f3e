"""`append_tokens` by the C++ kernel (csrc/rows/append_tokens.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.rows.append_tokens`."""
    call = library.call

    def append_tokens(
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        num_computed: torch.Tensor,
        num_tokens: torch.Tensor,
        row_tokens: torch.Tensor,
        spare: int,
        positions: torch.Tensor | None,
    ) -> None:
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        call(
            "append_tokens",
            slots.data_ptr(),
            slots.shape[0],
            token_ids.data_ptr(),
            num_computed.data_ptr(),
            num_tokens.data_ptr(),
            row_tokens.data_ptr(),
            row_tokens.stride(0),
            spare,
            None if positions is None else positions.data_ptr(),
        )

    return append_tokens
