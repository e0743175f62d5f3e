"""`decode_inputs` by the C++ kernel (csrc/rows/decode_inputs.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., None]:
    """The operation on `library`; contract in `quire.ops.rows.decode_inputs`."""
    call = library.call

    def decode_inputs(
        slots: torch.Tensor,
        num_computed: torch.Tensor,
        row_tokens: torch.Tensor,
        row_blocks: torch.Tensor,
        block_size: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        call(
            "decode_inputs",
            slots.data_ptr(),
            slots.shape[0],
            num_computed.data_ptr(),
            row_tokens.data_ptr(),
            row_tokens.stride(0),
            row_blocks.data_ptr(),
            row_blocks.stride(0),
            block_size,
            token_ids.data_ptr(),
            positions.data_ptr(),
            seq_lens.data_ptr(),
            slot_mapping.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
        )

    return decode_inputs
