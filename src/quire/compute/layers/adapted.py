"""Projections whose outputs a row's adapter changes (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from quire.compute.layers.adapter_contents import (
    BiasPlace,
    ExpertContent,
    ExpertPlace,
    HeadPlace,
    LowRank,
    NewRows,
    Place,
    SlotContents,
    TablePlace,
    add_bias,
)
from quire.compute.layers.token_columns import TokenColumn
from quire.compute.layers.weights import Cut, DenseWeights, LayerWeights, PackedWeights
from quire.config.shard import Share
from quire.ops import PackedMatrix
from quire.ops.linear.low_rank import LowRankTables

__all__ = ["ADAPTER_COLUMN", "AdaptedLayers", "AdaptedLinear", "Additions", "Projection"]

ADAPTER_COLUMN = "adapter"
"""Column of the rows: 0 for no adapter, else 1 + its slot."""

Content = TypeVar("Content")


class Projection(Protocol):
    """A layer from x [T, I] to [T, O]."""

    @property
    def weights(self) -> LayerWeights: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Additions:
    """Adds s B (A x), and the change of the bias, for each row that has an adapter."""

    def __init__(
        self,
        tables: LowRankTables,
        slots: TokenColumn,
        low_rank: Callable[..., None],
        biases: SlotContents[torch.Tensor],
        of_all_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """low_rank: the operation. of_all_ranks: reduces A x over ranks that share the inputs."""
        self._tables = tables
        self._slots = slots
        self._low_rank = low_rank
        self._biases = biases
        self._of_all_ranks = of_all_ranks

    @property
    def are_none(self) -> bool:
        """True in a step in which no row has an adapter."""
        return self._slots.is_zero

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to y [T, O] the contribution of adapters for x [T, I]. Call it only if a row has
        one."""
        self._low_rank(y, x, self._slots.values, self._tables, self._of_all_ranks)
        add_bias(y, self._biases)


class AdaptedLinear:
    """y = x Wᵀ + b, plus the contributions of adapters."""

    def __init__(self, base: Projection, additions: Additions) -> None:
        self._base = base
        self._additions = additions

    @property
    def weights(self) -> LayerWeights:
        """Weights of the base model."""
        return self._base.weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._base(x)
        if not self._additions.are_none:
            self._additions.add(y, x)
        return y


@dataclass(frozen=True, slots=True)
class _TablesPlace:
    """Part of a projection's outputs. order: see `orders` of `PackedWeights`. outputs, inputs:
    shares of this rank."""

    tables: LowRankTables
    part: int
    order: torch.Tensor | None
    outputs: Share
    inputs: Share
    is_apart: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs.total, self.inputs.total

    def put(self, slot: int, matrices: LowRank) -> None:
        a, b = Cut(1, self.inputs).of(matrices.a), Cut(0, self.outputs).of(matrices.b)
        b = b if self.order is None else b[self.order]
        self.tables.put(slot, self.part, a, b, matrices.scale)


@dataclass(frozen=True, slots=True)
class _Changed:
    """A projection that adapters may change. inputs: share of this rank. parts: outputs of this
    rank, by name."""

    weights: PackedWeights[Any]
    tables: LowRankTables
    inputs: Share
    parts: Mapping[str, Share]
    biases: SlotContents[torch.Tensor]


class AdaptedLayers:
    """Memory for adapters of all layers that they may change, by the weights of the layers.

    table, head: places for the embedding and the projection to logits, once the model has been
    built.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: TokenColumn,
        low_rank: Callable[..., None],
        linear: Callable[[torch.Tensor], PackedMatrix],
    ) -> None:
        """num_slots: adapters that may be in use at a time. max_rank: largest rank of any adapter.
        slots: the column with each row's slot. low_rank, linear: the operations."""
        self.num_slots, self.max_rank = num_slots, max_rank
        self.table: TablePlace | None = None
        self.head: HeadPlace | None = None
        self._dtype, self._device = dtype, device
        self._slots = slots
        self._low_rank, self._linear = low_rank, linear
        self._changed: dict[int, _Changed] = {}
        self._norms: dict[int, tuple[DenseWeights, SlotContents[torch.Tensor]]] = {}
        self._experts: dict[tuple[int, str], ExpertPlace] = {}
        self._contents: list[SlotContents[Any]] = []

    def additions(
        self,
        weights: PackedWeights[Any],
        inputs: Share,
        parts: Mapping[str, Share],
        of_all_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Additions:
        """Reserve memory for adapters of a layer. weights: weights of the layer. inputs: share of
        this rank. parts: outputs of this rank by name; "" if there is only one. of_all_ranks: see
        `Additions`."""
        sizes = [share.count for share in parts.values()]
        tables = LowRankTables(
            self.num_slots, self.max_rank, inputs.count, sizes, self._dtype, self._device
        )
        biases = self._kept(SlotContents[torch.Tensor](self._slots))
        self._changed[id(weights)] = _Changed(weights, tables, inputs, parts, biases)
        return Additions(tables, self._slots, self._low_rank, biases, of_all_ranks)

    def norm_biases(self, weights: DenseWeights) -> SlotContents[torch.Tensor]:
        """Reserve memory for the biases of a norm. weights: weights of the norm."""
        contents = self._kept(SlotContents[torch.Tensor](self._slots))
        self._norms[id(weights)] = weights, contents
        return contents

    def experts(
        self, layers: Mapping[int, tuple[LayerWeights, LayerWeights]], size: int, inner: int
    ) -> SlotContents[ExpertContent]:
        """Reserve memory for adapters of experts. layers: weights of gate and up, and of down, by
        expert. size, inner: widths of x and of an expert."""
        contents = self._kept(SlotContents[ExpertContent](self._slots))
        for expert, (gate_up, down) in layers.items():
            for part in ("gate", "up"):
                place = ExpertPlace((inner, size), contents, expert, part)
                self._experts[id(gate_up), f"{part}.weight"] = place
            place = ExpertPlace((size, inner), contents, expert, "down")
            self._experts[id(down), "weight"] = place
        return contents

    def vocabulary(self, num_tokens: int, size: int) -> tuple[TablePlace, HeadPlace]:
        """Reserve memory for adapters of the embedding and of the projection to logits."""
        of_table = self._kept(SlotContents[LowRank | NewRows | torch.Tensor](self._slots))
        of_head = self._kept(SlotContents[LowRank | NewRows | PackedMatrix](self._slots))
        self.table = TablePlace((size, num_tokens), of_table)
        self.head = HeadPlace(
            (num_tokens, size), of_head, lambda weight: self._linear(weight.to(self._device))
        )
        return self.table, self.head

    def _kept(self, contents: SlotContents[Content]) -> SlotContents[Content]:
        """Register contents that `clear` resets."""
        self._contents.append(contents)
        return contents

    def find(self, weights: LayerWeights, part: str) -> Place | None:
        """Return the place of a weight's low-rank matrices, None if adapters cannot change it.
        part: its name in `LayerWeights`."""
        if (expert := self._experts.get((id(weights), part))) is not None:
            return expert
        found = self._changed.get(id(weights))
        owner, _, kind = part.rpartition(".")
        if found is None or kind != "weight":
            return None
        order = found.weights.orders.get(owner)
        part_index = list(found.parts).index(owner)
        return _TablesPlace(found.tables, part_index, order, found.parts[owner], found.inputs)

    def find_bias(self, weights: LayerWeights, part: str) -> BiasPlace | None:
        """Return the place of a bias, None if adapters cannot change it. part: see `find`. Call it
        after the model has been loaded."""
        if (norm := self._norms.get(id(weights))) is not None:
            base = norm[0].part(part).float()
            return BiasPlace(norm[1], len(base), 0, base, Share.whole(len(base)))
        found = self._changed.get(id(weights))
        owner = part.rpartition(".")[0]
        if found is None or owner not in found.parts:
            return None
        first, size = 0, sum(share.count for share in found.parts.values())
        for name, share in found.parts.items():
            if name == owner:
                break
            first += share.count
        own = found.parts[owner]
        base = found.weights.bias[first : first + own.count].float()
        return BiasPlace(found.biases, size, first, base, own, found.weights.orders.get(owner))

    def set_apart(self, slot: int, *, is_apart: bool) -> None:
        """Set whether steps with this slot (from 0 on) run eagerly, outside of captured graphs."""
        if is_apart:
            self._slots.apart.add(slot + 1)
        else:
            self._slots.apart.discard(slot + 1)

    def clear(self, slot: int) -> None:
        """Reset the adapter of this slot, so that it changes nothing."""
        for each in self._changed.values():
            each.tables.clear(slot)
        for contents in self._contents:
            contents.clear(slot)
        self.set_apart(slot, is_apart=False)
