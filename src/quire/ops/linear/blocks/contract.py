"""Arguments of `linear_blocks`, and its stored form of scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.base.errors import EngineError
from quire.config.packed.block_kinds import BlockKind
from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.plain.contract import check_gate

__all__ = ["BlockScales", "Blocks", "check_arguments", "pack_scales", "quantize_groups"]


class Blocks(NamedTuple):
    """Weights [R, I] in B blocks and G groups along the inputs, as their kind defines.

    codes: uint8 [R, I], one per byte. scale: float32 [R, B]. minimum: float32 [R, B], if the kind
    has minima. factors: int8 [R, G], if the kind has factors. lows: uint8 [R, G], multiplied with
    minima if there are factors too; otherwise zero points int8 [R, B].
    """

    kind: BlockKind
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    lows: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        return self.codes.shape[1] // self.kind.group_size

    def levels(self) -> torch.Tensor:
        """float32 [R, I]."""
        if self.kind.levels is None:
            return self.codes.float() - self.kind.zero_code
        table = torch.tensor(self.kind.levels, dtype=torch.float32, device=self.codes.device)
        return table[self.codes.int()]

    def group_scales(self) -> torch.Tensor:
        """float32 [R, G]."""
        scale = self._of_groups(self.scale)
        return scale if self.factors is None else scale * self.factors

    def group_offsets(self) -> torch.Tensor | None:
        """float32 [R, G]; None of a kind that has none."""
        if self.minimum is not None:
            minimum = self._of_groups(self.minimum)
            return minimum if self.lows is None else minimum * self.lows
        return None if self.lows is None else self._of_groups(self.scale * -self.lows.float())

    def numbers(self) -> torch.Tensor:
        """float32 [R, I]: scale · level + offset."""
        grouped = self.levels().unflatten(1, (self.num_groups, -1))
        grouped *= self.group_scales().unsqueeze(-1)
        offsets = self.group_offsets()
        if offsets is not None:
            grouped += offsets.unsqueeze(-1)
        return grouped.flatten(1)

    def is_finite(self) -> bool:
        minimum = self.minimum
        return bool(self.scale.isfinite().all()) and (
            minimum is None or bool(minimum.isfinite().all())
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All but the kind."""
        return self[1:]

    def of_rows(self, num_rows: int) -> Blocks:
        """Return the same weights as rows of another length; neighbouring rows are joined side by
        side."""
        parts = (None if part is None else part.reshape(num_rows, -1) for part in self.tensors())
        return Blocks(self.kind, *parts)  # type: ignore[arg-type]

    def taken(self, index: torch.Tensor) -> Blocks:
        """Return the rows `index`, int64."""
        parts = (None if part is None else part[index] for part in self.tensors())
        return Blocks(self.kind, *parts)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: list[Blocks]) -> Blocks:
        """Stack weights of one kind and number of blocks."""
        columns = zip(*(part.tensors() for part in parts), strict=True)
        return cls(
            parts[0].kind,
            *(None if column[0] is None else torch.cat(column) for column in columns),  # type: ignore[arg-type]
        )

    def _of_groups(self, values: torch.Tensor) -> torch.Tensor:
        """[R, B] → [R, G]."""
        return values.repeat_interleave(self.num_groups // values.shape[1], dim=1)


class BlockScales(NamedTuple):
    """Scales as stored.

    scale, minimum: float16 [O, B]. power: float32 [O], multiplied with both; a power of two, or the
    scale itself for an output with a single scale.
    """

    scale: torch.Tensor
    minimum: torch.Tensor | None
    power: torch.Tensor


def pack_scales(blocks: Blocks) -> BlockScales:
    """Pack scales and minima into the values that the layer uses. They are exact if given in
    float16, or if a scale is the only one of its output; otherwise they keep 11 significant bits.
    Blocks 2**-25 below the largest of their output become zero."""
    if blocks.scale.shape[1] == 1 and blocks.minimum is None:
        ones = torch.ones_like(blocks.scale, dtype=torch.float16)
        return BlockScales(ones, None, blocks.scale.squeeze(1))
    both = blocks.scale if blocks.minimum is None else torch.cat((blocks.scale, blocks.minimum), 1)
    largest = both.abs().amax(dim=1, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    exact = (both.half().float() == both).all(dim=1, keepdim=True)
    power = torch.ldexp(torch.ones_like(largest), torch.where(exact, 0, exponent))
    minimum = None if blocks.minimum is None else (blocks.minimum / power).half()
    return BlockScales((blocks.scale / power).half(), minimum, power.squeeze(1))


def quantize_groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, I] of any float dtype → integers [T, G, size] held in float32, scales [T, G,
    1]; like `quantize_rows` with a scale for each group of `size` neighbours."""
    groups = x.shape[1] // size
    integers, scale = quantize_rows(x.reshape(len(x) * groups, size))
    return integers.view(len(x), groups, size), scale.view(len(x), groups, 1)


def check_arguments(
    blocks: Blocks, bias: torch.Tensor | None, gate: str | None = None
) -> tuple[int, int]:
    """Return the number of blocks and the inputs of one. Raises EngineError unless the tensors fit
    the kind, and as `check_gate`."""
    kind, codes = blocks.kind, blocks.codes
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.numel() == 0:
        raise EngineError(
            f"linear_blocks takes a uint8 matrix with one code per element, not {codes.dtype}"
            f"{list(codes.shape)}."
        )
    outputs, inputs = codes.shape
    num_blocks = blocks.scale.shape[-1] if blocks.scale.dim() == 2 else 0
    if num_blocks < 1 or inputs % (num_blocks * kind.group_size):
        raise EngineError(
            f"linear_blocks takes {kind.name} scales for blocks of a multiple of {kind.group_size} "
            f"inputs of a {outputs} × {inputs} weight, not {list(blocks.scale.shape)}."
        )
    by_block, by_group = (outputs, num_blocks), (outputs, inputs // kind.group_size)
    minima, zeros = kind.offset == "minimum", kind.offset == "zero"
    expected = (
        ("scale", blocks.scale, by_block, torch.float32),
        ("minimum", blocks.minimum, by_block if minima else None, torch.float32),
        ("factors", blocks.factors, by_group if kind.factors else None, torch.int8),
        (
            "lows",
            blocks.lows,
            by_block if zeros else by_group if minima and kind.factors else None,
            torch.int8 if zeros else torch.uint8,
        ),
    )
    for name, tensor, shape, dtype in expected:
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape or (tensor is not None and tensor.dtype != dtype):
            raise EngineError(
                f"linear_blocks takes {name} of {kind.name} as {dtype} of shape {shape}, not "
                f"{None if tensor is None else tensor.dtype} of shape {found}."
            )
    if bias is not None and bias.shape != (outputs,):
        raise EngineError(
            f"linear_blocks takes a bias of {outputs} numbers, not of {list(bias.shape)}."
        )
    check_gate(outputs, gate)
    if (largest := int(codes.max())) >> kind.bits:
        raise EngineError(f"linear_blocks takes {kind.bits}-bit codes; one is {largest}.")
    return num_blocks, inputs // num_blocks
