"""Activations, and their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.errors import ConfigError

__all__ = ["NAMES", "resolve_name"]

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
    }
)
"""Every name that is known, to the one of the activation."""


def resolve_name(kind: str) -> str:
    """gelu, gelu_tanh, relu or silu. Raises ConfigError for a name that is not known."""
    name = NAMES.get(kind)
    if name is None:
        raise ConfigError(f"Unknown activation: {kind!r}. Use one of: {', '.join(sorted(NAMES))}.")
    return name
