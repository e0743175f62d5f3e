"""Rare parts of adapters: changes of embeddings, logits, biases and experts.

Torch computes them, for the rows of one adapter at a time, in steps that are never captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from quire.compute.layers.token_columns import TokenColumn
from quire.compute.layers.weights import Cut
from quire.config.shard import Share
from quire.ops import PackedMatrix

__all__ = [
    "BiasPlace",
    "ExpertContent",
    "ExpertPlace",
    "HeadPlace",
    "LowRank",
    "NewRows",
    "Place",
    "SlotContents",
    "TablePlace",
    "add_bias",
]

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class LowRank:
    """scale · B A. a: [r, I]; b: [O, r], both of the model's dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [N, O] of x [N, I]."""
        return x.float() @ self.a.float().t() @ self.b.float().t() * self.scale

    def of_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [N, O] of one-hot inputs at `ids`, int64 [N]."""
        return self.a[:, ids].float().t() @ self.b.float().t() * self.scale


@dataclass(frozen=True, slots=True)
class NewRows:
    """rows: [N, E], in place of those of the tokens `ids`, int64 [N], in a table."""

    ids: torch.Tensor
    rows: torch.Tensor

    def of(self, found: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, E] that a table has for the tokens `asked`, int64 [T]. found: rows of
        the base."""
        same = asked[:, None] == self.ids
        new = self.rows[same.int().argmax(1)].to(found.dtype)
        return torch.where(same.any(1, keepdim=True), new, found)


class SlotContents(Generic[Content]):
    """The changes that the adapters in slots make to one layer."""

    def __init__(self, slots: TokenColumn) -> None:
        """slots: the column with each row's slot."""
        self._slots = slots
        self._by_slot: dict[int, Content] = {}

    def put(self, slot: int, content: Content) -> None:
        """Fill a slot, from 0 on."""
        self._by_slot[slot + 1] = content

    def get(self, slot: int) -> Content | None:
        return self._by_slot.get(slot + 1)

    def clear(self, slot: int) -> None:
        self._by_slot.pop(slot + 1, None)

    def of_rows(self) -> Iterator[tuple[torch.Tensor, Content]]:
        """Yield each adapter's content with the rows of the running forward that have it, int64
        [N]."""
        if self._slots.is_zero or not self._slots.is_apart:
            return
        values = self._slots.values
        for slot, content in self._by_slot.items():
            rows = (values == slot).nonzero()[:, 0]
            if len(rows):
                yield rows, content


class Place(Protocol):
    """Destination of one module's low-rank matrices. is_apart: True if torch computes with them,
    outside of captured steps."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    @property
    def is_apart(self) -> bool: ...

    def put(self, slot: int, matrices: LowRank) -> None:
        """Fill a slot, from 0 on, with matrices of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class TablePlace:
    """An embedding. shape: width and rows. contents: an addition to the table, or a replacement of
    all or of some rows."""

    shape: tuple[int, int]
    contents: SlotContents[LowRank | NewRows | torch.Tensor]
    is_apart: bool = True

    def put(self, slot: int, matrices: LowRank) -> None:
        self.contents.put(slot, matrices)

    def replace(self, slot: int, table: torch.Tensor) -> None:
        """Use this table in place of the base's for a slot."""
        self.contents.put(slot, table)

    def renew(self, slot: int, rows: NewRows) -> None:
        """Use these rows in place of the base's for a slot."""
        self.contents.put(slot, rows)

    def change(self, found: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, E] of ids [T] with the changes of their adapters. found: rows of the
        base."""
        for rows, content in self.contents.of_rows():
            asked = ids[rows].long()
            if isinstance(content, torch.Tensor):
                found[rows] = content[asked]
            elif isinstance(content, NewRows):
                found[rows] = content.of(found[rows], asked)
            else:
                found[rows] = (found[rows].float() + content.of_rows(asked)).to(found.dtype)
        return found


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """The projection to logits. shape: tokens and width. contents: an addition to the matrix, or a
    replacement of all or of some rows. pack: makes a matrix of weights [V, E]."""

    shape: tuple[int, int]
    contents: SlotContents[LowRank | NewRows | PackedMatrix]
    pack: Callable[[torch.Tensor], PackedMatrix]
    is_apart: bool = True

    def put(self, slot: int, matrices: LowRank) -> None:
        self.contents.put(slot, matrices)

    def replace(self, slot: int, weight: torch.Tensor) -> None:
        """Use this weight in place of the base's for a slot. It is packed once, as the base's."""
        self.contents.put(slot, self.pack(weight))

    def renew(self, slot: int, rows: NewRows) -> None:
        """Use these rows in place of the base's for a slot."""
        self.contents.put(slot, rows)

    def change(self, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [N, V], of hidden [N, E] with the changes of their
        adapters."""
        for rows, content in self.contents.of_rows():
            if isinstance(content, LowRank):
                logits[rows] += content.of(hidden[rows])
            elif isinstance(content, NewRows):
                logits[rows[:, None], content.ids] = hidden[rows].float() @ content.rows.float().t()
            else:
                logits[rows] = content(hidden[rows], torch.float32)
        return logits


@dataclass(frozen=True, slots=True)
class BiasPlace:
    """A slice of a layer's bias: outputs `first` to `last` of `size`. base: the layer's bias;
    float32. share: the rank's part of the model's outputs. order: see `orders` of `PackedWeights`.
    """

    contents: SlotContents[torch.Tensor]
    size: int
    first: int
    base: torch.Tensor
    share: Share
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.share.total,)

    def put(self, slot: int, bias: torch.Tensor) -> None:
        """Use this bias in place of the base's for a slot."""
        bias = Cut(0, self.share).of(bias)
        bias = bias if self.order is None else bias[self.order]
        whole = self.contents.get(slot)
        whole = torch.zeros(self.size) if whole is None else whole
        whole[self.first : self.first + len(bias)] = bias.float() - self.base
        self.contents.put(slot, whole)


@dataclass(slots=True)
class ExpertContent:
    """Matrices by expert: gate and up by part, and down."""

    gate_up: dict[int, dict[str, LowRank]] = field(default_factory=dict[int, "dict[str, LowRank]"])
    down: dict[int, LowRank] = field(default_factory=dict[int, LowRank])


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """One projection of an expert. part: "gate", "up" or "down"."""

    shape: tuple[int, int]
    contents: SlotContents[ExpertContent]
    expert: int
    part: str
    is_apart: bool = True

    def put(self, slot: int, matrices: LowRank) -> None:
        content = self.contents.get(slot) or ExpertContent()
        if self.part == "down":
            content.down[self.expert] = matrices
        else:
            content.gate_up.setdefault(self.expert, {})[self.part] = matrices
        self.contents.put(slot, content)


def add_bias(y: torch.Tensor, biases: SlotContents[torch.Tensor]) -> None:
    """Add to y [T, O], in place, the difference between the adapters' biases and the base's."""
    for rows, bias in biases.of_rows():
        y[rows] = (y[rows].float() + bias).to(y.dtype)
