"""Projections to whose outputs a row's adapter adds something (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from quire.layers.token_columns import TokenColumn
from quire.layers.weights import LayerWeights
from quire.ops.linear.low_rank import LowRankTables

__all__ = ["ADAPTER_COLUMN", "AdaptedLayers", "AdaptedLinear", "Additions", "Projection"]

ADAPTER_COLUMN = "adapter"
"""Column of the rows: 0 for no adapter, else 1 + its slot."""


class Projection(Protocol):
    """A layer from x [T, I] to [T, O]."""

    @property
    def weights(self) -> LayerWeights: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Additions:
    """s B (A x) of the adapter of each row that has one."""

    def __init__(
        self, tables: LowRankTables, slots: TokenColumn, low_rank: Callable[..., None]
    ) -> None:
        """low_rank: the operation."""
        self._tables = tables
        self._slots = slots
        self._low_rank = low_rank

    @property
    def are_none(self) -> bool:
        """True in a step in which no row has an adapter."""
        return self._slots.is_zero

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to y [T, O] what adapters make of x [T, I]. In steps in which a row has one."""
        self._low_rank(y, x, self._slots.values, self._tables)


class AdaptedLinear:
    """y = x Wᵀ + b, and what adapters add to it."""

    def __init__(self, base: Projection, additions: Additions) -> None:
        self._base = base
        self._additions = additions

    @property
    def weights(self) -> LayerWeights:
        """Weights of the base."""
        return self._base.weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        if not self._additions.are_none:
            self._additions.add(y, x)
        return y


class AdaptedLayers:
    """Tables of all projections that adapters may change, by the weights of these."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: TokenColumn,
        low_rank: Callable[..., None],
    ) -> None:
        """num_slots: adapters that may be in use at a time. max_rank: of all of them. slots: the
        column that says which row has which. low_rank: the operation."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self._dtype, self._device = dtype, device
        self._slots = slots
        self._low_rank = low_rank
        self._tables: dict[int, tuple[LowRankTables, Mapping[str, int]]] = {}

    def additions(self, weights: LayerWeights, inputs: int, parts: Mapping[str, int]) -> Additions:
        """Places for adapters of a layer. weights: of the layer. parts: outputs by name; "" of an
        only one."""
        tables = LowRankTables(
            self.num_slots, self.max_rank, inputs, list(parts.values()), self._dtype, self._device
        )
        order = {name: index for index, name in enumerate(parts)}
        self._tables[id(weights)] = tables, order
        return Additions(tables, self._slots, self._low_rank)

    def find(self, weights: LayerWeights, part: str) -> tuple[LowRankTables, int] | None:
        """Tables of a layer's part, and its index in them; None if adapters cannot change it. part:
        of a weight, as `LayerWeights` names it."""
        found = self._tables.get(id(weights))
        owner, _, kind = part.rpartition(".")
        if found is None or kind != "weight":
            return None
        tables, order = found
        return tables, order[owner]

    def clear(self, slot: int) -> None:
        """Have the adapter of this slot add nothing."""
        for tables, _ in self._tables.values():
            tables.clear(slot)
