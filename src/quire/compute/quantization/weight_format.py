"""Interface of a format: it packs a matrix of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol, Self

import torch

from quire.base.errors import EngineError
from quire.compute.quantization.packed import StoredMatrix
from quire.ops import PackedMatrix, PartialMatrix
from quire.ops.linear.rotate.reference import rotate

__all__ = ["CutFormat", "CuttableFormat", "Rotate", "WeightFormat", "WidensStored", "row_blocks"]

BLOCK_ELEMENTS = 1 << 18
"""Elements quantized at a time: 1 MiB in float32, so that intermediate results stay in the caches
and the largest matrix of a model never exists in float32."""

Rotate = Callable[[torch.Tensor, int], torch.Tensor]
"""`rotate` of `quire.ops.linear.rotate`, by any provider."""

DEVICE_BLOCK_ELEMENTS = 1 << 24
"""Elements quantized at a time on a GPU, which would wait for the host over smaller blocks."""


class WeightFormat(Protocol):
    """One way to keep a matrix. keeps_stored: whether `keep` takes matrices that the checkpoint
    holds quantized; if not, they are widened to the model's dtype first."""

    @property
    def keeps_stored(self) -> bool: ...

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        """Pack weight [O, I] and bias [O] of one dtype, which may be released afterwards. gate: see
        `quire.ops.linear.plain`."""
        ...

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> PackedMatrix:
        """Parts one below the other, of which some come quantized; as
        `quire.compute.quantization.packed.keep`."""
        ...


_NOT_WIDENED = "A matrix with bits of its own was not widened first; this is a bug."


class WidensStored:
    """Base of a `WeightFormat` that makes its own bits of all matrices."""

    keeps_stored = False

    def shared(self, inputs: int, unit: int) -> Self:  # noqa: ARG002
        """Return the same, since nothing is rotated."""
        return self

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> NoReturn:
        del parts, bias, dtype, gate
        raise EngineError(_NOT_WIDENED)

    def keep_partial(
        self, part: StoredMatrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> NoReturn:
        del part, bias, dtype
        raise EngineError(_NOT_WIDENED)


class CuttableFormat(WeightFormat, Protocol):
    """One way to keep a matrix whose inputs ranks may share."""

    def shared(self, inputs: int, unit: int) -> CuttableFormat:
        """Return the format of a matrix whose inputs ranks may share, in parts of whole units of
        `unit`; it does not depend on the number of ranks."""
        ...

    def cut(self, inputs: range) -> CutFormat | None:
        """Return how a rank keeps these inputs of a matrix whose numbers are made of whole rows;
        None if they can be cut before they are packed. Raises ConfigError where no cut is
        possible."""
        ...

    def keep_partial(
        self, part: StoredMatrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PartialMatrix:
        """Keep some inputs of a quantized matrix, cut from it; bias [O] of the whole."""
        ...


class CutFormat(Protocol):
    """One way to keep some inputs of a matrix."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PartialMatrix:
        """weight [O, I] of all inputs, and bias [O], as in `WeightFormat`."""
        ...


def row_blocks(
    weight: torch.Tensor, rotation: int = 1, rotate: Rotate = rotate
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Whole rows of `weight` [O, I] in float32, a block of them at a time, and which they are.
    rotation: give them for inputs that are rotated in blocks of this size (`linear_int8`), by
    `rotate`, which may be a kernel with the same bits."""
    outputs, inputs = weight.shape
    elements = BLOCK_ELEMENTS if weight.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    height = max(1, elements // inputs)
    for start in range(0, outputs, height):
        rows = slice(start, min(start + height, outputs))
        block = weight[rows]
        yield rows, block.float() if rotation == 1 else rotate(block, rotation).div_(rotation)
