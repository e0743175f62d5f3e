"""Pointwise activations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional

from quire.errors import ConfigError

__all__ = ["ACTIVATIONS", "activation"]

_GELU_TANH = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_new": _GELU_TANH,
        "gelu_pytorch_tanh": _GELU_TANH,
        "gelu_tanh": _GELU_TANH,
        "relu": functional.relu,
        "silu": functional.silu,
    }
)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes and names as in the contract (`quire.ops.activation`)."""
    function = ACTIVATIONS.get(kind)
    if function is None:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"Unknown activation: {kind!r}. Use one of: {known}.")
    return function(x)
