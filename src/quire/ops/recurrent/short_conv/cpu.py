"""`short_conv` by the C++ kernel (csrc/recurrent/short_conv.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, pointer, state_arguments

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.recurrent.short_conv`."""
    call = library.call

    def short_conv(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        num_computed: torch.Tensor,
        gated: bool,
    ) -> torch.Tensor:
        taps, size = weight.shape
        width = 3 * size if gated else size
        if not (x.dtype == weight.dtype == states.dtype and x.shape[1] == width):
            raise EngineError(
                f"short_conv takes x [T, {width}] and states of its weight's {weight.dtype}, "
                f"not {x.dtype} {list(x.shape)} and {states.dtype}"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
        call(
            "short_conv",
            x.data_ptr(),
            x.stride(0),
            int(gated),
            out.data_ptr(),
            size,
            weight.data_ptr(),
            taps,
            pointer(bias),
            *state_arguments(states, (read, write), slots, starts, num_computed),
            DTYPE_CODES[x.dtype],
        )
        return out

    return short_conv
