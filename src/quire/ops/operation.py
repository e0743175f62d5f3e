"""Operations: one contract, a plain reference, and providers compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.platform import Platform

__all__ = ["Case", "Op", "Provider", "Tolerance", "exact", "rounding"]


@dataclass(frozen=True, slots=True)
class Case:
    """One call to compare. Tensors among `args` may be changed in place; the outcome of a call is
    what it returns and what its tensor arguments hold afterwards."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - expected| ≤ atol + rtol · |expected|, and why that much is right."""

    rtol: float
    atol: float
    reason: str


FOR_CPUS, FOR_GPUS = "it is for CPUs", "it is for GPUs"
"""Reasons of `Provider.unavailable` on the other device."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operation.

    unavailable: why this machine cannot run it, as a sentence, or None when it can.
    load: returns the callable; called only where `unavailable` gave None. It may be given the team
    of threads that computes; without, the calling thread does.
    tolerance: of its own, where it rounds what the reference does not; None for the operation's.
    lacks: optional parts of the operation's contract that it does not have, such as an argument.
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
    """providers: best first; the reference is always there and comes after all of them.

    make_inputs: cases from a seeded generator. tolerance: by dtype of the first tensor argument.
    apply: how an implementation computes a case, `apply(implementation, *args, **kwargs)`.
    """

    name: str
    reference: Callable[..., Any]
    make_inputs: Callable[[torch.Generator], Iterator[Case]]
    tolerance: Mapping[torch.dtype, Tolerance]
    providers: tuple[Provider, ...] = ()
    apply: Callable[..., Any] = _call

    def provider(self, name: str) -> Provider | None:
        """The provider called `name`, or None."""
        return next((each for each in self.providers if each.name == name), None)


def exact(reason: str = "data is moved, not computed") -> dict[torch.dtype, Tolerance]:
    """For operations with one right result."""
    same = Tolerance(0.0, 0.0, reason)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return dict.fromkeys(dtypes, same)


def rounding(reason: str, *, float32: float = 2e-6) -> dict[torch.dtype, Tolerance]:
    """Both sides accumulate in float32 and round once to the dtype: at most one unit in the last
    place apart, after `float32` relative differences in the order of the sums."""
    return {
        torch.float32: Tolerance(float32, float32, reason),
        torch.float16: Tolerance(2**-10, 1e-4, reason + "; one rounding step of float16"),
        torch.bfloat16: Tolerance(2**-7, 1e-3, reason + "; one rounding step of bfloat16"),
    }
