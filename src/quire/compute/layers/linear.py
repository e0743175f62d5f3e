"""Projections. A merged projection computes several checkpoint tensors in one matrix product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.base.errors import ConfigError
from quire.compute.layers.weights import NO_ORDERS, Outputs, PackedWeights, Placement
from quire.compute.quantization import (
    CutFormat,
    CuttableFormat,
    StoredMatrix,
    WeightFormat,
    WidensStored,
)
from quire.config.shard import Share
from quire.ops import PackedMatrix, PartialMatrix
from quire.ops.distributed import Collectives
from quire.ops.linear.plain.contract import GatedPacked
from quire.ops.linear.plain.partial import PlainPartial, ProductInPieces

__all__ = ["Linear", "MergedLinear", "PartialSums", "RowLinear", "Tree"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Sum of partial sums in the order of a tree. num_pieces: pieces of this rank's inputs. add:
    the operation."""

    num_pieces: int
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Ways to add the partial sums of ranks. tree: adds those of a plain matrix within a rank
    (`ProductInPieces`); None for one product. over_ranks: the connection to the other ranks."""

    over_ranks: Collectives
    tree: Tree | None = None


class Linear:
    """y = x Wᵀ + b; x [T, I] → [T, O], where O are the outputs of this rank.

    transposed: the checkpoint stores W as [I, O] (GPT-2's Conv1D). num_outputs: number of outputs
    if larger than the rank's share; the others are zero.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        outputs: Share,
        placement: Placement,
        *,
        bias: bool,
        transposed: bool = False,
        num_outputs: int | None = None,
    ) -> None:
        self.weights: PackedWeights[PackedMatrix] = PackedWeights(
            weight_format,
            Share.whole(in_features),
            Outputs({"": outputs}, num_outputs=num_outputs),
            placement,
            bias=bias,
            transposed=transposed,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)


class MergedLinear:
    """Projections of one input, with their outputs side by side; x [T, I] → [T, sum of the parts].

    parts: outputs of this rank by name, in order. gate: an activation that is applied to the first
    of two equal parts and multiplied with the second; [T, size of a part]. orders: see
    `Outputs`.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        parts: Mapping[str, Share],
        placement: Placement,
        *,
        bias: bool,
        gate: str | None = None,
        orders: Mapping[str, torch.Tensor] = NO_ORDERS,
    ) -> None:
        self.weights: PackedWeights[PackedMatrix] = PackedWeights(
            weight_format,
            Share.whole(in_features),
            Outputs(parts, gate, orders=orders),
            placement,
            bias=bias,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of both parts before the gate: [T, sum of the parts]."""
        matrix = self.weights.matrix
        assert isinstance(matrix, GatedPacked), "it was made with a gate"
        return matrix.ungated(x)


class RowLinear:
    """y = x Wᵀ + b over inputs that ranks share; x [T, I], where I are the inputs of this rank, →
    [T, O], the same on each rank.

    The whole matrix is converted to its format, and the rank keeps its part of it. So integer
    layers sum, over all ranks, to the bits of the undivided matrix. transposed: see `Linear`.
    """

    def __init__(
        self,
        weight_format: CuttableFormat,
        inputs: Share,
        out_features: int,
        placement: Placement,
        sums: PartialSums,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        """Raises ConfigError if the matrix cannot be divided there in its format."""
        tree = sums.tree
        (kept,) = inputs.ranges
        cut_format = weight_format.cut(kept)
        if cut_format is not None and tree is not None:
            raise ConfigError(
                "rank_invariant=True: sums of quantized matrices are not made as a tree. Leave it "
                "out, or load the model without quantization."
            )
        self.weights: PackedWeights[PartialMatrix] = PackedWeights(
            _PlainInputs(weight_format, tree) if cut_format is None else _CutInputs(cut_format),
            inputs if cut_format is None else Share.whole(inputs.total),
            Outputs({"": Share.whole(out_features)}),
            placement,
            bias=bias,
            transposed=transposed,
        )
        self._collectives = sums.over_ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        matrix, collectives = self.weights.matrix, self._collectives
        if isinstance(matrix, PlainPartial):
            return collectives.sum_rows(matrix.partial(x), matrix.bias, x.dtype)
        largest = matrix.largest(x)
        if largest is not None:
            largest = collectives.all_reduce(largest, "max")
        sums = collectives.all_reduce(matrix.partial(x, largest))
        return matrix.complete(sums, largest, x.dtype)


class _PlainInputs:
    """Some inputs of a matrix that is divided before it is packed."""

    def __init__(self, weight_format: CuttableFormat, tree: Tree | None) -> None:
        self._format, self._tree = weight_format, tree
        self.keeps_stored = weight_format.keeps_stored and tree is None

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PartialMatrix:
        if self._tree is None:
            return PlainPartial(self._format.pack(weight, None, gate=gate), bias)
        pieces = weight.chunk(self._tree.num_pieces, dim=1)
        packed = [self._format.pack(piece.contiguous(), None) for piece in pieces]
        return PlainPartial(ProductInPieces(packed, self._tree.add), bias)

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,  # noqa: ARG002  no projection with a gate is cut by inputs
    ) -> PartialMatrix:
        (part,) = parts
        assert isinstance(part, StoredMatrix)
        return self._format.keep_partial(part, bias, dtype)


class _CutInputs(WidensStored):
    """Some inputs of a matrix that is packed whole."""

    def __init__(self, cut_format: CutFormat) -> None:
        self._format = cut_format

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gate: str | None = None,  # noqa: ARG002  no projection with a gate is cut by inputs
    ) -> PartialMatrix:
        return self._format.pack(weight, bias)
