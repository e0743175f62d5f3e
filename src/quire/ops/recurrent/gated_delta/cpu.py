"""`gated_delta` by the C++ kernel (csrc/recurrent/gated_delta.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, state_arguments

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """The operation on `library`; contract in `quire.ops.recurrent.gated_delta`."""
    call = library.call

    def gated_delta(
        x: torch.Tensor,
        gates: torch.Tensor,
        log_rates: torch.Tensor,
        bias: torch.Tensor,
        states: torch.Tensor,
        read: torch.Tensor,
        write: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        num_computed: torch.Tensor,
        keys: tuple[int, int],
        in_turn: bool,
    ) -> torch.Tensor:
        (num_keys, key_dim), num_heads = keys, len(log_rates)
        value_dim = (x.shape[1] - 2 * num_keys * key_dim) // num_heads
        if x.dtype != gates.dtype or states.shape[1] != num_heads * key_dim * value_dim:
            raise EngineError(
                f"gated_delta was given x {x.dtype} {list(x.shape)}, gates {gates.dtype} and "
                f"states {list(states.shape)} for {num_heads} heads with keys of {key_dim}"
            )
        x = x.contiguous()
        out = torch.empty((len(x), num_heads * value_dim), dtype=x.dtype, device=x.device)
        call(
            "gated_delta",
            x.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            log_rates.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            num_keys,
            key_dim,
            num_heads,
            value_dim,
            int(in_turn),
            *state_arguments(states, (read, write), slots, starts, num_computed),
            DTYPE_CODES[x.dtype],
        )
        return out

    return gated_delta
