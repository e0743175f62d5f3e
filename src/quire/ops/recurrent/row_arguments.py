"""Arguments that all kernels of recurrent operations have in common."""

from __future__ import annotations

import torch

__all__ = ["row_arguments"]


def row_arguments(
    states: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
) -> tuple[int, ...]:
    """Return states and rows (`quire.ops.recurrent.short_conv`) in the order of the kernels."""
    return (
        states.data_ptr(),
        states.stride(0),
        read.data_ptr(),
        write.data_ptr(),
        slots.data_ptr(),
        len(slots),
        starts.data_ptr(),
        num_computed.data_ptr(),
    )
