"""`activation` and `activation_and_mul` by the C++ kernels (csrc/pointwise/pointwise.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES
from quire.ops.pointwise.activation.contract import resolve_factor, resolve_gate, resolve_name

__all__ = ["APART", "bind", "bind_with_mul", "factor_code", "gate_code"]

# enum Activation of csrc/pointwise/activations.h
_CODES: Mapping[str, int] = MappingProxyType(
    {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3, "swiglu_clamped": 4, "relu2": 5}
)
_SIGMOID = 6  # kSigmoid of csrc/pointwise/pointwise.cpp
_UNGATED = -1  # kUngated of csrc/pointwise/gate.h
APART = -2
"""kApart there: packed for a gate that another operation applies."""


def gate_code(gate: str | None) -> int:
    """Return the `gate` of a linear layer in the form of its kernels."""
    return _UNGATED if gate is None else _CODES[resolve_gate(gate)]


def factor_code(kind: str) -> int:
    """Return the function of `activation_times` in the form of its kernel (csrc/pointwise)."""
    name = resolve_factor(kind)
    return _SIGMOID if name == "sigmoid" else _CODES[name]


def bind(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`activation` on `library`; contract in `quire.ops.pointwise.activation`."""
    call = library.call

    def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
        code = _CODES[resolve_name(kind)]
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel() > 0:
            call("activation", x.data_ptr(), out.data_ptr(), x.numel(), code, DTYPE_CODES[x.dtype])
        return out

    return activation


def bind_with_mul(library: NativeLibrary) -> Callable[..., torch.Tensor]:
    """`activation_and_mul` on `library`; contract in `quire.ops.pointwise.activation`."""
    call = library.call

    def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
        code = _CODES[resolve_gate(kind)]
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
        if out.numel() > 0:
            call(
                "activation_and_mul",
                x.data_ptr(),
                2 * width,
                out.data_ptr(),
                out.numel() // width,
                width,
                code,
                DTYPE_CODES[x.dtype],
            )
        return out

    return activation_and_mul
