"""Names of a checkpoint's tensors as data, and where each tensor goes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from quire.compute.layers import LayerWeights, WeightedLayer
from quire.compute.layers.weights import Cut, PackedWeights
from quire.config import TensorInfo

__all__ = ["Stacked", "WeightMap", "WeightTarget"]

COMPILED = "_orig_mod."
"""Prefix that torch.compile puts into the names of a model saved from it."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Part of a layer's weights that takes one checkpoint tensor. shape: expected on disk, of the
    whole tensor."""

    weights: LayerWeights
    part: str
    shape: tuple[int, ...]

    @property
    def cut(self) -> Cut | None:
        """The cut of the tensor; None for all of it."""
        return self.weights.cut(self.part)

    @property
    def is_transposed(self) -> bool:
        """True if a plain matrix is [inputs, outputs] on disk."""
        return isinstance(self.weights, PackedWeights) and self.weights.is_transposed

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor in memory that the target takes."""
        return whole if self.cut is None else self.cut.of(whole)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices, or biases, of all experts in one tensor. parts: names of those of one expert, with
    its number as {}, which share the rows equally. interleaved: their rows take turns.
    is_transposed: rows are columns on disk."""

    parts: tuple[str, ...]
    interleaved: bool = False
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Checkpoint names of one model family.

    prefix: prefix of all names but the head's; some checkpoints leave it out. outer, block: the
    layer's name on disk to its place in the model or block object, "attribute.attribute", and
    ":part" if it is one part of a merged layer; a name with {} stands for each expert by its
    number. Layers of experts are in a mapping there, None for those of other ranks. The model has
    every place that its map names. blocks: the name of a block on disk, with its index as {}; one
    without {} is the name of the only block.
    stacked: name of a tensor of all experts of a block, to its layout.
    embedding, head: names on disk of the two that may be tied. ignored: regular expressions of
    tensors that are not weights. beside: names like those of outer, of layers without the prefix.
    endings, parts: endings and parts of names in other files, to those here. others: beginnings of
    names of layers that are no part of the model.
    """

    prefix: str
    outer: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]
    embedding: str
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()
    stacked: Mapping[str, Stacked] = field(default_factory=dict[str, Stacked])
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    endings: Mapping[str, str] = field(default_factory=dict[str, str])
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    others: tuple[str, ...] = ()

    def targets(self, model: object) -> dict[str, WeightTarget]:
        """Every tensor that `model` needs, by its full name on disk."""
        blocks: Sequence[object] = attrgetter("blocks")(model)
        found = dict(_targets(self.prefix, self.outer, model))
        for index, block in enumerate(blocks):
            found.update(_targets(self.prefix + self.blocks.format(index), self.block, block))
        found.update(_targets("", self.beside, model))
        found.update(_targets("", {self.head.removesuffix(".weight"): "lm_head"}, model))
        return found

    def elsewhere(self, model: object) -> frozenset[str]:
        """Names on disk of layers that other ranks have as a whole."""
        blocks: Sequence[object] = attrgetter("blocks")(model)
        return frozenset(
            name
            for index, block in enumerate(blocks)
            for name, _, layer in _layers(
                self.prefix + self.blocks.format(index), self.block, block
            )
            if layer is None
        )

    def canonical(self, name: str, known: Mapping[str, object]) -> str:
        """The name in `known` that the tensor `name` of a file stands for, else `name`."""
        plain = name.replace(COMPILED, "")
        for old, new in self.parts.items():
            plain = plain.replace(old, new)
        for old, new in self.endings.items():
            if plain.endswith(old):
                plain = plain.removesuffix(old) + new
        return plain if plain in known or self.prefix + plain not in known else self.prefix + plain

    def pieces(self, name: str, tensor: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """A tensor by its canonical name; of one of all experts the parts by theirs."""
        block, rest = self.in_block(name)
        held = self.stacked.get(rest) if block else None
        if held is None or len(tensor.shape) < 2:
            yield name, tensor
            return
        split = tensor.pieces(
            len(held.parts), interleaved=held.interleaved, is_transposed=held.is_transposed
        )
        for expert, pieces in enumerate(split):
            for part, piece in zip(held.parts, pieces, strict=True):
                yield block + part.format(expert), piece

    def in_block(self, name: str) -> tuple[str, str]:
        """The name of the block and the rest; "" and all of it for what is in no block."""
        start, index, end = self.blocks.partition("{}")
        number = r"\d+" if index else ""
        block = re.match(re.escape(self.prefix + start) + number + re.escape(end), name)
        return ("", name) if block is None else (block.group(), name[block.end() :])

    def is_ignored(self, name: str) -> bool:
        """Return whether the tensor is no weight of the model, but of another layer, or a buffer
        that old versions saved."""
        plain = name.replace(COMPILED, "")
        if plain.startswith(self.others) or (self.prefix + plain).startswith(self.others):
            return True
        return any(re.search(pattern, name) for pattern in self.ignored)


def _targets(
    prefix: str, names: Mapping[str, str], owner: object
) -> Iterator[tuple[str, WeightTarget]]:
    for name, merged, layer in _layers(prefix, names, owner):
        if layer is None:
            continue
        for part, shape in layer.weights.shapes().items():
            owner_part, _, kind = part.rpartition(".")
            if owner_part == merged:
                full = f"{name}.{kind}" if kind else name
                yield full, WeightTarget(layer.weights, part, shape)


def _layers(
    prefix: str, names: Mapping[str, str], owner: object
) -> Iterator[tuple[str, str, WeightedLayer | None]]:
    """Layers by their names on disk, and which part of them has the name. None: a part of an expert
    that another rank has."""
    for on_disk, place in names.items():
        path, _, merged = place.partition(":")
        found = _at(owner, path)
        if found is None:
            continue
        layers: Mapping[int, WeightedLayer | None] = found if "{}" in on_disk else {0: found}
        for number, layer in layers.items():
            yield prefix + on_disk.format(number), merged, layer


def _at(owner: object, path: str) -> Any:
    """Return what is at "attribute.attribute"; None if something on the way is None."""
    for name in path.split("."):
        owner = None if owner is None else getattr(owner, name)
    return owner
