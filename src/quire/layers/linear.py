"""Projections. A merged one is several checkpoint tensors in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from quire.config.shard import Share
from quire.distributed import Collectives
from quire.layers.weights import Cut, PackedWeights
from quire.ops import PackedMatrix, PartialMatrix
from quire.ops.linear.plain.partial import PlainPartial
from quire.quantization import CuttableFormat, WeightFormat

__all__ = ["Linear", "MergedLinear", "RowLinear"]


class Linear:
    """y = x Wᵀ + b; x [T, I] → [T, O], O being the outputs that this rank has.

    transposed: the checkpoint stores W as [I, O] (GPT-2's Conv1D). num_outputs: if more than the
    rank has; the others are zero.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        outputs: Share,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        transposed: bool = False,
        num_outputs: int | None = None,
    ) -> None:
        height = num_outputs or outputs.count
        weight = torch.empty((height, in_features), dtype=dtype, device=device)
        biases = torch.empty((height,), dtype=dtype, device=device) if bias else None
        storage = _storage(weight, biases, outputs.count, transposed=transposed)
        cuts = {"weight": Cut(int(transposed), outputs), "bias": Cut(0, outputs)}
        self.weights: PackedWeights[PackedMatrix] = PackedWeights(
            weight_format.pack,
            weight,
            biases,
            storage,
            {} if outputs.is_whole else {part: cuts[part] for part in storage},
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)


class MergedLinear:
    """Projections of one input, their outputs side by side; x [T, I] → [T, sum of the parts].

    parts: outputs of this rank by name, in the order of the output. gate: an activation of the
    first of two parts of one size, times the second; [T, its size].
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        parts: Mapping[str, Share],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        gate: str | None = None,
    ) -> None:
        sizes = [share.count for share in parts.values()]
        weight = torch.empty((sum(sizes), in_features), dtype=dtype, device=device)
        biases = torch.empty((sum(sizes),), dtype=dtype, device=device) if bias else None
        storage: dict[str, torch.Tensor] = {}
        for kind, tensor in (("weight", weight), ("bias", biases)):
            if tensor is not None:
                views = zip(parts, tensor.split(sizes), strict=True)
                storage |= {f"{part}.{kind}": view for part, view in views}
        shares = {part: parts[part.partition(".")[0]] for part in storage}
        cuts = {part: Cut(0, share) for part, share in shares.items() if not share.is_whole}
        pack = partial(weight_format.pack, gate=gate)
        self.weights: PackedWeights[PackedMatrix] = PackedWeights(
            pack, weight, biases, storage, cuts
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)


class RowLinear:
    """y = x Wᵀ + b over inputs that are cut among ranks; x [T, I], I being the inputs that this
    rank has, → [T, O], the same on each rank.

    Numbers of a format are made of the whole matrix, of which the rank keeps its part. So what
    integer layers of all ranks give is, to the bit, what the uncut matrix gives. transposed: as in
    `Linear`.
    """

    def __init__(
        self,
        weight_format: CuttableFormat,
        inputs: Share,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        """Raises ConfigError if the format cannot be cut there."""
        (kept,) = inputs.ranges
        cut_format = weight_format.cut(kept)
        depth = inputs.count if cut_format is None else inputs.total
        weight = torch.empty((out_features, depth), dtype=dtype, device=device)
        biases = torch.empty((out_features,), dtype=dtype, device=device) if bias else None

        def pack_plain(weight: torch.Tensor, bias: torch.Tensor | None) -> PartialMatrix:
            return PlainPartial(weight_format.pack(weight, None), bias)

        self.weights: PackedWeights[PartialMatrix] = PackedWeights(
            pack_plain if cut_format is None else cut_format.pack,
            weight,
            biases,
            _storage(weight, biases, out_features, transposed=transposed),
            {"weight": Cut(int(not transposed), inputs)} if cut_format is None else {},
        )
        self._all_reduce = collectives.all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.weights.matrix
        largest = matrix.largest(x)
        if largest is not None:
            largest = self._all_reduce(largest, "max")
        return matrix.complete(self._all_reduce(matrix.partial(x, largest)), largest, x.dtype)


def _storage(
    weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, *, transposed: bool
) -> dict[str, torch.Tensor]:
    """Where the parts of a matrix are copied to. Outputs beyond the first ones become zero."""
    for tensor in (weight, bias):
        if tensor is not None:
            tensor[outputs:].zero_()
    storage = {"weight": weight[:outputs].t() if transposed else weight[:outputs]}
    return storage if bias is None else {**storage, "bias": bias[:outputs]}
