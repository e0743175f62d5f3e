"""Activations, and their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.base.errors import ConfigError

__all__ = [
    "FACTORS",
    "GATES",
    "NAMES",
    "SWIGLU_ALPHA",
    "SWIGLU_LIMIT",
    "resolve_factor",
    "resolve_gate",
    "resolve_name",
]

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
        "silu": "silu",
    }
)
"""All known names, with the activation of each."""


SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Numbers of the gate swiglu_clamped."""

GATES: Mapping[str, str] = MappingProxyType({**NAMES, "swiglu_clamped": "swiglu_clamped"})
"""Names of gates, some of which change the other factor too."""


FACTORS: Mapping[str, str] = MappingProxyType({**NAMES, "sigmoid": "sigmoid"})
"""Names of functions whose value multiplies a separate tensor."""


def resolve_name(kind: str) -> str:
    """Return gelu, gelu_tanh, relu, relu2 or silu. Raises ConfigError for an unknown name."""
    return _resolve(kind, NAMES)


def resolve_gate(kind: str) -> str:
    """Return the same, or swiglu_clamped. Raises ConfigError for an unknown name."""
    return _resolve(kind, GATES)


def resolve_factor(kind: str) -> str:
    """Return a name of `resolve_name`, or sigmoid. Raises ConfigError for an unknown name."""
    return _resolve(kind, FACTORS)


def _resolve(kind: str, names: Mapping[str, str]) -> str:
    name = names.get(kind)
    if name is None:
        raise ConfigError(f"Unknown activation: {kind!r}. Use one of: {', '.join(sorted(names))}.")
    return name
