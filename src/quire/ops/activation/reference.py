"""Pointwise activations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional

from quire.ops.activation.contract import resolve_name

__all__ = ["activation"]

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
    }
)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes and names as in the contract (`quire.ops.activation`)."""
    return _FUNCTIONS[resolve_name(kind)](x)
