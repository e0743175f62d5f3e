"""Projections to whose outputs a row's adapter adds something (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from quire.layers.token_columns import TokenColumn
from quire.layers.weights import LayerWeights
from quire.ops.linear.low_rank import LowRankTables

__all__ = ["ADAPTER_COLUMN", "AdaptedLayers", "AdaptedLinear", "Projection"]

ADAPTER_COLUMN = "adapter"
"""Column of the rows: 0 for no adapter, else 1 + its slot."""


class Projection(Protocol):
    """A layer from x [T, I] to [T, O]."""

    @property
    def weights(self) -> LayerWeights: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class AdaptedLinear:
    """y = x Wᵀ + b, and s B (A x) of the adapter of each row that has one."""

    def __init__(
        self,
        base: Projection,
        tables: LowRankTables,
        slots: TokenColumn,
        low_rank: Callable[..., None],
    ) -> None:
        """low_rank: the operation."""
        self._base = base
        self._tables = tables
        self._slots = slots
        self._low_rank = low_rank

    @property
    def weights(self) -> LayerWeights:
        """Weights of the base."""
        return self._base.weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        self._low_rank(y, x, self._slots.values, self._tables)
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

    def adapt(self, base: Projection, inputs: int, parts: Mapping[str, int]) -> AdaptedLinear:
        """The layer with places for adapters. parts: outputs by name; "" of an only one."""
        tables = LowRankTables(
            self.num_slots, self.max_rank, inputs, list(parts.values()), self._dtype, self._device
        )
        order = {name: index for index, name in enumerate(parts)}
        self._tables[id(base.weights)] = tables, order
        return AdaptedLinear(base, tables, self._slots, self._low_rank)

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
