"""4 bits per weight, one scale and, if wanted, one zero point per group of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from quire.base.errors import ConfigError
from quire.compute.quantization.weight_format import Rotate, WidensStored, row_blocks
from quire.config.quantization import INT4_GROUP_SIZE
from quire.ops import OpSet, PackedMatrix, PartialMatrix
from quire.ops.linear.int4.contract import pack_scale
from quire.ops.linear.rotate import rotate

__all__ = ["Int4Format", "Int4Matrix", "quantize_int4"]

LARGEST = 15
MIDDLE = 8
"""The zero of a symmetric group: values 0 to 15 stand for -8 to 7."""

EXTREMES = (7.2, 8.0, 8.8)
"""Places where the number of largest size in a symmetric group lands, before it is rounded and cut
off at -8: on wider and on narrower grids. One place alone has more error (docs/quantization.md);
more than three gain little."""

SHARES = (1.0, 0.95, 0.9, 0.85)
"""Shares of the range of a group with a zero point that its grid may span."""


class Int4Format(WidensStored):
    """`WeightFormat` for inputs that are a multiple of the group size.

    group_size: inputs that share a scale. zero_points: a grid from the smallest to the largest
    number of a group; without, one that is symmetric around zero. Inputs are rotated within groups.
    """

    def __init__(
        self, ops: OpSet, group_size: int = INT4_GROUP_SIZE, *, zero_points: bool = True
    ) -> None:
        self._ops = ops
        self._group_size = group_size
        self._zero_points = zero_points

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        size, zero_points = self._group_size, self._zero_points
        values, scale, zero = quantize_int4(
            weight, size, zero_points=zero_points, rotation=size, rotate=self._ops.rotate
        )
        linear = self._ops.gated_linear("linear_int4", gate)
        return linear(values, scale, zero, bias, dtype=weight.dtype, rotation=size)

    def cut(self, inputs: range) -> _CutInt4:
        size = self._group_size
        if inputs.start % size or inputs.stop % size:
            raise ConfigError(
                f"inputs {inputs.start} to {inputs.stop - 1} of a matrix begin or end within a "
                f"group of {size} that shares a scale; use fewer ranks, smaller groups or "
                "quantization='int8'"
            )
        return _CutInt4(self._ops, size, inputs, zero_points=self._zero_points)


class _CutInt4:
    """Scales are rounded as those of whole rows, which keeps them as they are when the part's are
    rounded again: these have the same bits, or more."""

    def __init__(self, ops: OpSet, group_size: int, inputs: range, *, zero_points: bool) -> None:
        self._ops = ops
        self._group_size, self._zero_points = group_size, zero_points
        self._inputs = slice(inputs.start, inputs.stop)
        self._groups = slice(inputs.start // group_size, inputs.stop // group_size)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PartialMatrix:
        size, zero_points = self._group_size, self._zero_points
        values, scale, zero = quantize_int4(
            weight, size, zero_points=zero_points, rotation=size, rotate=self._ops.rotate
        )
        half, power = pack_scale(scale)
        rounded = half.float() * power.unsqueeze(1)
        return self._ops.partial_linear("linear_int4")(
            values[:, self._inputs],
            rounded[:, self._groups],
            None if zero is None else zero[:, self._groups],
            bias,
            dtype=weight.dtype,
            rotation=size,
        )


Int4Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Values, scales and zero points."""


def quantize_int4(
    weight: torch.Tensor,
    group_size: int = INT4_GROUP_SIZE,
    *,
    zero_points: bool = True,
    rotation: int = 1,
    rotate: Rotate = rotate,
) -> Int4Matrix:
    """weight [O, I] → values uint8 [O, I] in 0 to 15, scales float32 [O, I / group_size], and zero
    points uint8 of the same shape or None, which is 8; weight ≈ (value - zero) · scale,
    of inputs that are rotated in blocks of `rotation`, by `rotate`.

    Of a few grids each group takes the one with the smallest squared error. I must be a multiple of
    group_size.
    """
    outputs, inputs = weight.shape
    grid = (outputs, inputs // group_size)
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(grid, dtype=torch.float32, device=weight.device)
    zeros = torch.empty(grid, dtype=torch.uint8, device=weight.device) if zero_points else None
    grids = _grids_between_extremes if zero_points else _symmetric_grids
    for rows, block in row_blocks(weight, rotation, rotate):
        groups = block.view(-1, grid[1], group_size)
        best = _best_fit(groups, grids(groups))
        values[rows] = (best.levels + best.zero).view(-1, inputs)
        scales[rows] = best.scale.squeeze(2)
        if zeros is not None:
            zeros[rows] = best.zero.squeeze(2).nan_to_num_()  # weights that are NaN
    return values.clamp_(max=LARGEST), scales, zeros  # the same


_Grid = tuple[torch.Tensor, torch.Tensor]
"""Scale and zero point of each group, both [O, groups, 1] in float32."""


class _Fit(NamedTuple):
    """Groups on a grid. levels: values less the zero point, [O, groups, group_size]. gain: squared
    error of zeros less that of the fit. gain, scale, zero: [O, groups, 1]."""

    levels: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor
    gain: torch.Tensor


def _symmetric_grids(groups: torch.Tensor) -> Iterator[_Grid]:
    """Grids from -8 to 7 times a scale, whose sign lets the longer side hold the extreme."""
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    extreme = torch.where(-low > high, low, high)
    zero = torch.full_like(extreme, MIDDLE)
    for place in EXTREMES:
        yield extreme / -place, zero


def _grids_between_extremes(groups: torch.Tensor) -> Iterator[_Grid]:
    """Grids over shares of the range, which always holds 0 (Jacob et al. 2018, section 2.1)."""
    low = groups.amin(2, keepdim=True).clamp_max_(0)
    high = groups.amax(2, keepdim=True).clamp_min_(0)
    for share in SHARES:
        scale = (high - low) * (share / LARGEST)
        zero = (-share * low / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, LARGEST)
        yield scale, zero


def _best_fit(groups: torch.Tensor, grids: Iterator[_Grid]) -> _Fit:
    """Return for each group the grid with the largest gain."""
    best = _fit(groups, *next(grids))
    for grid in grids:
        other = _fit(groups, *grid)
        better = other.gain > best.gain
        best = _Fit(*(torch.where(better, new, old) for new, old in zip(other, best, strict=True)))
    return best


def _fit(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> _Fit:
    """Round to the grid, then take the scale that is best for the rounded levels q: Σwq / Σq²,
    by least squares, which leaves the squared error Σw² - (Σwq)² / Σq²."""
    levels = groups / torch.where(scale == 0, 1.0, scale)
    levels.round_().add_(zero).clamp_(0, LARGEST).sub_(zero)
    product = (groups * levels).sum(2, keepdim=True)
    power = (levels * levels).sum(2, keepdim=True).clamp_min_(1.0)
    scale = product / power
    return _Fit(levels, zero, scale, product * scale)
