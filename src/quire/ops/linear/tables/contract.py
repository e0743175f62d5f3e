"""Arguments of `linear_tables`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.base.errors import EngineError
from quire.config.packed.table_format import TABLE_BITS
from quire.ops.linear.plain.contract import check_gate

__all__ = ["Added", "Tables", "check_arguments"]


class Added(NamedTuple):
    """Numbers to add to single weights, one after the other. rows, columns: int64 [N]; numbers:
    float32 [N]."""

    rows: torch.Tensor
    columns: torch.Tensor
    numbers: torch.Tensor


class Tables(NamedTuple):
    """Weights [R, I] in B blocks along the inputs.

    codes: uint8 [R, I], one per byte. table: float32 [1, entries] for all outputs, or [R, entries]
    for each. scale: float32 [R, B].
    """

    codes: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor
    added: Added | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.table.shape[1].bit_length() - 1

    @property
    def block_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def numbers(self) -> torch.Tensor:
        """Return the weights, float32 [R, I]: entry · scale, plus the added numbers."""
        if len(self.table) == 1:
            entries = self.table[0].index_select(0, self.codes.flatten().int())
            entries = entries.view(self.codes.shape)
        else:
            entries = self.table.gather(1, self.codes.long())
        weights = entries.mul_(self.scale.repeat_interleave(self.block_size, dim=1))
        if self.added is not None:
            rows, columns, numbers = self.added
            weights.index_put_((rows, columns), numbers, accumulate=True)
        return weights

    def taken(self, index: torch.Tensor) -> Tables:
        """Return the rows `index`, int64; none of them twice."""
        added = self.added
        if added is not None:
            places = torch.full_like(self.codes[:, 0], -1, dtype=torch.int64)
            places[index] = torch.arange(len(index), device=index.device)
            rows = places[added.rows]
            is_taken = rows >= 0
            added = Added(rows[is_taken], added.columns[is_taken], added.numbers[is_taken])
        table = self.table if len(self.table) == 1 else self.table[index]
        return Tables(self.codes[index], table, self.scale[index], added)

    @classmethod
    def joined(cls, parts: list[Tables]) -> Tables:
        """Stack weights with blocks of one size, and with equal tables or one for each output."""
        first, added, rows = parts[0], list[Added](), 0
        for part in parts:
            if part.added is not None:
                added.append(part.added._replace(rows=part.added.rows + rows))
            rows += len(part.codes)
        return cls(
            torch.cat([part.codes for part in parts]),
            first.table if len(first.table) == 1 else torch.cat([part.table for part in parts]),
            torch.cat([part.scale for part in parts]),
            Added(*(torch.cat(each) for each in zip(*added, strict=True))) if added else None,
        )


def check_arguments(weight: Tables, bias: torch.Tensor | None, gate: str | None = None) -> None:
    """Raise EngineError unless the tensors fit together, and as `check_gate`."""
    codes, table, scale, added = weight
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.numel() == 0:
        raise EngineError(
            f"linear_tables takes a uint8 matrix with one code per element, not {codes.dtype}"
            f"{list(codes.shape)}."
        )
    outputs, inputs = codes.shape
    known = [(rows, 1 << bits) for rows in (1, outputs) for bits in TABLE_BITS]
    if tuple(table.shape) not in known or table.dtype != torch.float32:
        raise EngineError(
            f"linear_tables takes float32 tables of {', '.join(map(str, TABLE_BITS))} bits for all "
            f"or each of {outputs} outputs, not {table.dtype}{list(table.shape)}."
        )
    blocks = scale.shape[1] if scale.dim() == 2 and len(scale) == outputs else 0
    if scale.dtype != torch.float32 or not blocks or inputs % (4 * blocks):
        raise EngineError(
            f"linear_tables takes float32 scales for blocks of a multiple of 4 inputs of a "
            f"{outputs} × {inputs} weight, not {scale.dtype}{list(scale.shape)}."
        )
    if bias is not None and bias.shape != (outputs,):
        raise EngineError(
            f"linear_tables takes a bias of {outputs} numbers, not of {list(bias.shape)}."
        )
    check_gate(outputs, gate)
    if (largest := int(codes.max())) >> weight.bits:
        raise EngineError(f"linear_tables takes {weight.bits}-bit codes; one is {largest}.")
    if added is not None and added.numbers.numel():
        for index, size in ((added.rows, outputs), (added.columns, inputs)):
            low, high = (int(end) for end in index.aminmax())
            if low < 0 or high >= size or index.shape != added.numbers.shape:
                raise EngineError(
                    f"linear_tables adds numbers at 0 to {size - 1}, not at {low} to {high}."
                )
