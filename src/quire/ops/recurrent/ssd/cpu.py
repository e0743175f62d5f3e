"""`ssd` by the C++ kernel (csrc/recurrent/ssd.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, state_arguments

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.recurrent.ssd`."""
    call = library.call

    def ssd(
        x: torch.Tensor,
        dt: torch.Tensor,
        log_rates: torch.Tensor,
        bias: torch.Tensor,
        skip: torch.Tensor,
        states: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        num_computed: torch.Tensor,
        groups: tuple[int, int],
        limits: tuple[float, float],
    ) -> torch.Tensor:
        (num_groups, size), num_heads = groups, len(log_rates)
        width = x.shape[1] - 2 * num_groups * size
        if x.dtype != dt.dtype or width % num_heads or states.shape[1] != width * size:
            raise EngineError(
                f"ssd was given x {x.dtype} {list(x.shape)}, dt {dt.dtype} and states "
                f"{list(states.shape)} for {num_heads} heads with states of {size}"
            )
        x, dt = x.contiguous(), dt if dt.stride(1) == 1 else dt.contiguous()
        out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
        call(
            "ssd",
            x.data_ptr(),
            dt.data_ptr(),
            dt.stride(0),
            log_rates.data_ptr(),
            bias.data_ptr(),
            skip.data_ptr(),
            *limits,
            out.data_ptr(),
            num_heads,
            width // num_heads,
            num_groups,
            size,
            *state_arguments(states, (read, write), slots, starts, num_computed),
            DTYPE_CODES[x.dtype],
        )
        return out

    return ssd
