"""Compares a provider with the reference, for the tests and `quire doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.ops.operation import Case, Op, Provider, Tolerance

__all__ = ["CheckReport", "Outcomes", "check_provider", "compare", "reference_outcomes"]

Outcomes = list[list[torch.Tensor]]
"""Results of a call for each case, then the contents of its tensor arguments afterwards."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """num_cases: compared. failures: one sentence each, empty when all agree."""

    op: str
    provider: str
    num_cases: int
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.num_cases > 0 and not self.failures


def reference_outcomes(op: Op, *, seed: int = 0) -> Outcomes:
    """Compute the reference of every case of `op`, for checks of several providers."""
    cases = op.make_inputs(torch.Generator().manual_seed(seed))
    return [_outcome(op, op.reference, case, torch.device("cpu")) for case in cases]


def check_provider(
    op: Op,
    provider: Provider,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    expected: Outcomes | None = None,
) -> CheckReport:
    """Run every case of `op` that the provider supports on both, and compare. The provider must be
    available here.

    device: device of the provider; the reference computes on the CPU. expected:
    `reference_outcomes` of this seed, if known.
    """
    call = provider.load()
    if provider.tolerance is not None:
        op = replace(op, tolerance=provider.tolerance)
    failures: list[str] = []
    num_cases = 0
    for index, case in enumerate(op.make_inputs(torch.Generator().manual_seed(seed))):
        if not provider.lacks.isdisjoint((*case.kwargs, *case.needs)):
            continue
        num_cases += 1
        difference = compare(op, call, case, device, None if expected is None else expected[index])
        if difference is not None:
            failures.append(f"{op.name} by {provider.name}, {case.label}: {difference}")
    return CheckReport(op.name, provider.name, num_cases, tuple(failures))


def compare(
    op: Op,
    call: Callable[..., Any],
    case: Case,
    device: torch.device | None = None,
    expected: list[torch.Tensor] | None = None,
) -> str | None:
    """Return the largest difference of one case from the reference, None within tolerance.
    expected: outcome of the reference, if known."""
    dtype = next((arg.dtype for arg in case.args if _is_float_tensor(arg)), torch.float32)
    cpu = torch.device("cpu")
    if expected is None:
        expected = _outcome(op, op.reference, case, cpu)
    got = [value.cpu() for value in _outcome(op, call, case, device or cpu)]
    if len(got) != len(expected):
        return f"{len(got)} results, expected {len(expected)}"
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        difference = _difference(one, other, op.tolerance[dtype])
        if difference is not None:
            return f"result {index}: {difference}"
    return None


def _is_float_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outcome(
    op: Op, call: Callable[..., Any], case: Case, device: torch.device
) -> list[torch.Tensor]:
    """Return a call's results, then the contents of its tensor arguments afterwards."""
    args = [_copy(arg, device) for arg in case.args]
    kwargs = {name: _copy(value, device) for name, value in case.kwargs.items()}
    result = op.apply(call, *args, **kwargs)
    returned = result if isinstance(result, tuple) else (result,)
    return [value for value in (*returned, *args) if isinstance(value, torch.Tensor)]


def _copy(value: Any, device: torch.device) -> Any:
    """Return a copy with the same strides, so that a provider meets the layout of the case."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 0:
        return value.to(device)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    storage = value.as_strided((span,), (1,)).to(device, copy=True)
    return storage.as_strided(value.shape, value.stride())


def _difference(got: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> str | None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"
    one, other = got.double(), expected.double()
    if torch.allclose(one, other, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return None
    wrong_nan = int((one.isnan() != other.isnan()).sum())
    worst = (one - other).abs().nan_to_num(0.0).max().item()
    return (
        f"largest difference {worst:.3g}, {wrong_nan} NaN on one side only "
        f"(tolerance {tolerance.rtol:.3g} relative, {tolerance.atol:.3g} absolute)"
    )
