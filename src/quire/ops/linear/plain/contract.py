"""Contract of `linear`: a matrix that was packed once and multiplies many times."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from quire.errors import EngineError
from quire.ops.pointwise.activation.contract import resolve_gate

__all__ = [
    "GatedPacked",
    "NO_GATE",
    "NO_PARTIAL",
    "IntoMatrix",
    "PackedMatrix",
    "PartialMatrix",
    "check_arguments",
    "check_gate",
    "refuse_rows",
]

NO_GATE = frozenset({"gate"})
"""`lacks` of a provider that does not take it."""

NO_PARTIAL = frozenset({"partial"})
"""`lacks` of a provider whose matrices are no `PartialMatrix`."""


class PackedMatrix(Protocol):
    """W [O, I] and b [O], laid out as the provider likes. They may not be kept as they came."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [..., I] of any float dtype → x Wᵀ + b, [..., O] in x's dtype, or in float32 where
        `out_dtype` says so (logits): then the float32 sums as they are, not rounded between. A
        gated one gives [..., O / 2]: `activation_and_mul` of that."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] integers → the rows W[ids], [T, I] (a tied embedding): bit for bit, or in the
        dtype that a matrix of integers was made for. A gated one may refuse (EngineError)."""
        ...


@runtime_checkable
class GatedPacked(Protocol):
    """`PackedMatrix` with a gate, which can leave it to others."""

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] → x Wᵀ + b, [T, O] in x's dtype, of which `activation_and_mul` gives what the
        matrix gives, bit for bit."""
        ...


@runtime_checkable
class IntoMatrix(Protocol):
    """`PackedMatrix` that writes where it is told."""

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, I] → out [T, O], rows with a stride, in x's dtype or in float32."""
        ...


class PartialMatrix(Protocol):
    """Some inputs of a matrix whose other inputs are elsewhere: what `PackedMatrix` gives in three
    parts, between which sums are added. Bias and scales are those of the whole matrix."""

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Largest magnitude of each row of x [T, I], float32 [T, 1], where rows become integers of
        one scale; NaN if a number is. None where they do not."""
        ...

    def partial(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
        """Sums over the inputs x [T, I], [T, O]: int32 with one scale per output, else float32.
        largest: of the whole rows; of x if None."""
        ...

    def complete(
        self, sums: torch.Tensor, largest: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """[T, O] from sums over all inputs. largest: as it was given to `partial`."""
        ...


def check_arguments(
    weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None = None
) -> None:
    """Raises EngineError unless weight is [O, I] with O, I > 0 and bias is [O] or None, and as
    `check_gate`."""
    if weight.dim() != 2 or weight.numel() == 0:
        raise EngineError(
            f"linear takes a matrix of at least one output and one input, not {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise EngineError(
            f"linear takes a bias of {weight.shape[0]} numbers, not of {list(bias.shape)}."
        )
    check_gate(weight.shape[0], gate)


def check_gate(outputs: int, gate: str | None) -> None:
    """Raises EngineError if outputs have no halves for a gate, ConfigError for an unknown name."""
    if gate is not None and outputs % 2 != 0:
        raise EngineError(f"A gated layer has an even number of outputs, not {outputs}.")
    if gate is not None:
        resolve_gate(gate)


def refuse_rows(gate: str | None) -> None:
    """Raises EngineError for a gated matrix, whose rows lie in another order."""
    if gate is not None:
        raise EngineError("A gated layer gives no rows of its weight.")
