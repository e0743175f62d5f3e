"""Contract of `linear`: a matrix that is packed once and multiplies many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from quire.base.errors import EngineError
from quire.ops.pointwise.activation.contract import resolve_gate

__all__ = [
    "GatedPacked",
    "NO_GATE",
    "NO_PARTIAL",
    "IntoMatrix",
    "PackedMatrix",
    "PartialMatrix",
    "apply_linear",
    "apply_linear_in",
    "check_arguments",
    "check_gate",
    "refuse_rows",
]

NO_GATE = frozenset({"gate"})
"""Entry of `lacks` for a provider without gates."""

NO_PARTIAL = frozenset({"partial"})
"""Entry of `lacks` for a provider whose matrices are no `PartialMatrix`."""


class PackedMatrix(Protocol):
    """W [O, I] and b [O], in the provider's own layout. The given tensors may not be kept."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return x Wᵀ + b, [..., O], for x [..., I] of any float dtype: in x's dtype, or the
        unrounded float32 sums if `out_dtype` asks for them (logits). A gated matrix returns
        `activation_and_mul` of that, [..., O / 2]."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows W[ids], [T, I], of ids [T] (a tied embedding): bit for bit, or in the
        dtype for which a matrix of integers was made. A gated one may refuse (EngineError)."""
        ...


@runtime_checkable
class GatedPacked(Protocol):
    """A gated `PackedMatrix` that can leave the gate to others."""

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, [T, O] in x's dtype, for x [T, I]. `activation_and_mul` of it equals the
        matrix's own output, bit for bit."""
        ...


@runtime_checkable
class IntoMatrix(Protocol):
    """A `PackedMatrix` that can write into a given tensor."""

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of x [T, I] to out [T, O], rows with a stride, in x's dtype or in
        float32."""
        ...


class PartialMatrix(Protocol):
    """Some inputs of a matrix whose other inputs are elsewhere. It computes what `PackedMatrix`
    does in three parts, between which sums are added. Bias and scales are those of the whole
    matrix."""

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the largest magnitude of each row of x [T, I], float32 [T, 1], NaN if the row has
        one. None if rows are not quantized with a single scale."""
        ...

    def partial(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sums over the inputs x [T, I], [T, O]: int32 with one scale per output,
        otherwise float32. largest: largest magnitudes of whole rows; None takes those of x."""
        ...

    def complete(
        self, sums: torch.Tensor, largest: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Return [T, O] from sums over all inputs. largest: the argument of `partial`."""
        ...


def check_arguments(
    weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None = None
) -> None:
    """Raise EngineError unless weight is [O, I] with O, I > 0 and bias is [O] or None, and as
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
    """Raise EngineError if a gate cannot halve the outputs, ConfigError for an unknown name."""
    if gate is not None and outputs % 2 != 0:
        raise EngineError(f"A gated layer has an even number of outputs, not {outputs}.")
    if gate is not None:
        resolve_gate(gate)


def apply_linear(
    linear: Callable[..., PackedMatrix], x: torch.Tensor, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute a case of `Op`: products in the dtype of x and in float32 and, without a gate, rows.
    arguments: arguments of `linear`, then the ids of the rows."""
    *weight, ids = arguments
    matrix = linear(*weight, **options)
    products = matrix(x), matrix(x, torch.float32)
    return products if "gate" in options else (*products, matrix.rows(ids))


def apply_linear_in(
    linear: Callable[..., PackedMatrix], x: torch.Tensor, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute `apply_linear` with a matrix of integers that is made for the dtype of x."""
    return apply_linear(linear, x, *arguments, dtype=x.dtype, **options)


def refuse_rows(gate: str | None) -> None:
    """Raise EngineError for a gated matrix, whose rows are in another order."""
    if gate is not None:
        raise EngineError("A gated layer gives no rows of its weight.")
