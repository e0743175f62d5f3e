"""Pointwise activations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional

from quire.ops.pointwise.activation.contract import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    resolve_gate,
    resolve_name,
)

__all__ = ["activation", "activation_and_mul"]


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).float().square().to(x.dtype)


_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "relu2": _relu_squared,
        "silu": functional.silu,
    }
)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes and names as in the contract (`quire.ops.pointwise.activation`)."""
    return _FUNCTIONS[resolve_name(kind)](x)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.pointwise.activation`)."""
    gate, up = x.float().chunk(2, dim=-1)
    if resolve_gate(kind) == "swiglu_clamped":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)).to(x.dtype)
    return (activation(gate, kind) * up).to(x.dtype)
