"""Operations: one contract, a plain reference, and providers that are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.base.platform import Platform

__all__ = ["Case", "Op", "Provider", "Tolerance", "exact", "rounding"]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to compare. Tensors among `args` may be changed in place. The outcome of a call is
    its results and the contents of its tensor arguments afterwards. needs: optional parts of the
    contract that it uses besides its keyword arguments (`Provider.lacks`)."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - expected| ≤ atol + rtol · |expected|, and the reason for the bounds."""

    rtol: float
    atol: float
    reason: str


FOR_CPUS, FOR_GPUS = "it is for CPUs", "it is for GPUs"
"""Reasons of `Provider.unavailable` on the other device."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operation.

    unavailable: returns why this machine cannot run it, as a sentence, or None if it can. load:
    returns the callable; called only where `unavailable` returned None. It may be given the team of
    threads; without one, the calling thread computes. tolerance: its own, if it rounds where the
    reference does not; None for the operation's. lacks: optional parts of the contract that it does
    not support, such as an argument.
    """

    name: str
    unavailable: Callable[[Platform], str | None]
    load: Callable[..., Callable[..., Any]]
    tolerance: Mapping[torch.dtype, Tolerance] | None = None
    lacks: frozenset[str] = frozenset()


def _call(implementation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return implementation(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Op:
    """providers: best first; the reference always exists and comes last.

    make_inputs: yields cases from a seeded generator. tolerance: allowed error, by dtype of the
    first tensor argument. apply: computes a case with an implementation, `apply(implementation,
    *args, **kwargs)`.
    """

    name: str
    reference: Callable[..., Any]
    make_inputs: Callable[[torch.Generator], Iterator[Case]]
    tolerance: Mapping[torch.dtype, Tolerance]
    providers: tuple[Provider, ...] = ()
    apply: Callable[..., Any] = _call

    def provider(self, name: str) -> Provider | None:
        """Return the provider called `name`, or None."""
        return next((each for each in self.providers if each.name == name), None)


def exact(reason: str = "data is moved, not computed") -> dict[torch.dtype, Tolerance]:
    """Tolerance of operations with one exact result."""
    same = Tolerance(0.0, 0.0, reason)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return dict.fromkeys(dtypes, same)


def rounding(reason: str, *, float32: float = 2e-6) -> dict[torch.dtype, Tolerance]:
    """Tolerance if both sides accumulate in float32 and round once to the dtype. They differ by at
    most one unit in the last place, after relative differences of `float32` from the order of the
    sums."""
    return {
        torch.float32: Tolerance(float32, float32, reason),
        torch.float16: Tolerance(2**-10, 1e-4, reason + "; one rounding step of float16"),
        torch.bfloat16: Tolerance(2**-7, 1e-3, reason + "; one rounding step of bfloat16"),
    }
