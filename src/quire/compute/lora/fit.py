"""Checks of adapters against a model, and their tensors as the model's layers take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire.base.errors import ConfigError
from quire.compute.layers.adapted import AdaptedLayers
from quire.compute.layers.adapter_contents import (
    BiasPlace,
    ExpertPlace,
    HeadPlace,
    LowRank,
    NewRows,
    Place,
    TablePlace,
)
from quire.compute.models import CausalLM
from quire.compute.models.weight_map import Stacked
from quire.config.adapters import AdapterFolder, LowRankPair
from quire.config.hf import StoredTensor

__all__ = ["AdapterTensors", "FittedAdapter", "ModelPlaces", "ModelShapes"]

Shape = tuple[int, ...]

_WRAPPED = ".base_layer"
_IN_CHECKPOINTS = ((".mlp.", ".block_sparse_moe."),)
"""Names that modules have in `transformers` 5, and in checkpoints."""


class ExpertMatrix(NamedTuple):
    """One parameter with a matrix of each expert. parts: modules of an expert's projections, by the
    number of the expert. shape: outputs of all parts, and inputs."""

    parts: list[list[str]]
    shape: tuple[int, int]
    stacked: Stacked


class ModelPlaces:
    """Places for adapters of a model, by module as its weights are named; None for a module that
    adapters cannot change.

    projections: places of low-rank matrices. tables: places of embeddings. whole: layers whose
    weight an adapter may replace. biases: places of the biases of projections and norms.
    """

    def __init__(self, model: CausalLM, layers: AdaptedLayers) -> None:
        """model: the loaded model."""
        self.names = model.weight_map
        self.projections: dict[str, Place | None] = {}
        self.biases: dict[str, BiasPlace | None] = {}
        for name, target in self.names.targets(model).items():
            module, _, kind = name.rpartition(".")
            if kind == "weight":
                self.projections[module] = layers.find(target.weights, target.part)
            elif kind == "bias":
                self.biases[module] = layers.find_bias(target.weights, target.part)
        self.projections.update(self._experts_elsewhere(model))
        embedding = self.names.embedding.removesuffix(".weight")
        head = self.names.head.removesuffix(".weight")
        assert layers.table is not None and layers.head is not None, "the model was made"
        self.projections[head] = layers.head
        self.tables: dict[str, TablePlace] = {embedding: layers.table}
        self.whole: dict[str, TablePlace | HeadPlace] = {
            embedding: layers.table, head: layers.head
        }  # fmt: skip
        self.is_tied = self.names.head not in self.names.targets(model)

    def _experts_elsewhere(self, model: CausalLM) -> dict[str, Place | None]:
        """Places of experts that other ranks have, by the module: like those of this rank's."""
        own: dict[tuple[str, str], ExpertPlace] = {}
        for module, place in self.projections.items():
            if isinstance(place, ExpertPlace):
                owner, _, part = module.rsplit(".", 2)
                own[owner, part] = place
        found: dict[str, Place | None] = {}
        for module in self.names.elsewhere(model):
            owner, number, part = module.rsplit(".", 2)
            found[module] = replace(own[owner, part], expert=int(number))
        return found


class ModelShapes:
    """Shapes that parts of adapters have in a model, by module as its weights are named; None for a
    module that adapters cannot change. Keeps nothing of the model alive.

    projections, tables: outputs and inputs of both matrices together. whole, biases: shapes of the
    tensors.
    """

    def __init__(self, places: ModelPlaces) -> None:
        self._names, self._is_tied = places.names, places.is_tied
        self.projections = {name: _shape(place) for name, place in places.projections.items()}
        self.biases = {name: _shape(place) for name, place in places.biases.items()}
        self.tables = {name: place.shape for name, place in places.tables.items()}
        self.whole = {
            name: place.shape if isinstance(place, HeadPlace) else place.shape[::-1]
            for name, place in places.whole.items()
        }

    def name_of(self, module: str, known: Mapping[str, object]) -> str:
        """The module as the model's weights name it, if it is known; some adapters leave the prefix
        out."""
        forms = [module, self._names.prefix + module]
        forms += [form.replace(*names) for form in forms for names in _IN_CHECKPOINTS]
        return next((form for form in forms if form in known), module)

    def with_rows_of(self, module: str) -> list[str]:
        """The table or head `module`, and the head that shares its rows."""
        name = self.name_of(module, self.whole)
        is_shared = self._is_tied and name in self.tables
        return [name, *([self._names.head.removesuffix(".weight")] if is_shared else [])]

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor is no weight of the model, though it may be saved."""
        return self._names.is_ignored(name)

    def experts_of(self, module: str) -> list[ExpertMatrix]:
        """Parameters of a module of experts, as PEFT wraps it."""
        owner = module.replace(_WRAPPED, "")
        forms = {owner, self._names.prefix + owner}
        forms |= {form.replace(*names) for form in forms for names in _IN_CHECKPOINTS}
        return [
            matrix for form in forms for matrix in self._matrices_of(*self._names.in_block(form))
        ]

    def _matrices_of(self, block: str, owner: str) -> Iterator[ExpertMatrix]:
        for key, stacked in self._names.stacked.items():
            patterns = [part.removesuffix(".weight") for part in stacked.parts]
            if not block or key.rpartition(".")[0] != owner or patterns == list(stacked.parts):
                continue  # the last are biases
            parts: list[list[str]] = []
            while all(block + each.format(len(parts)) in self.projections for each in patterns):
                parts.append([block + each.format(len(parts)) for each in patterns])
            shapes = [self.projections[name] for name in parts[0]] if parts else []
            if shapes and (first := shapes[0]) is not None:
                yield ExpertMatrix(parts, (first[0] * len(shapes), first[1]), stacked)


def _shape(place: Place | BiasPlace | None) -> Shape | None:
    return None if place is None else place.shape


class AdapterTensors(NamedTuple):
    """Tensors by module, under the names of the model's weights. matrices: low-rank matrices of
    projections. tables: low-rank matrices of embeddings. whole, biases, rows: weights, biases and
    rows of tokens in place of the model's."""

    matrices: dict[str, LowRank]
    tables: dict[str, LowRank]
    whole: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    rows: dict[str, NewRows]


class FittedAdapter:
    """An adapter that was checked against a model, by names and shapes."""

    def __init__(self, found: AdapterFolder, shapes: ModelShapes) -> None:
        """Raises ConfigError for a module that the model has not, that adapters cannot change, or
        that has another shape."""
        self._found, self._shapes = found, shapes
        self._experts: dict[str, ExpertMatrix] = {}
        for name, pair in found.modules.items():
            if pair.num_experts is None and not name.endswith(_WRAPPED):
                self._check(name, pair, shapes.projections)
            else:
                self._experts[name] = self._check_experts(name, pair)
        for name, pair in found.tables.items():
            self._check(name, pair, {**dict.fromkeys(shapes.projections), **shapes.tables})
        for name, tensor in found.whole.items():
            known = {**dict.fromkeys(shapes.projections), **shapes.whole}
            self._compare(name, "its weight", tensor.shape, self._shape(name, known))
        for name, new in found.tokens.items():
            tokens, width = self._shape(name, {**dict.fromkeys(shapes.projections), **shapes.whole})
            self._compare(name, "the new rows", new.rows.shape, (len(new.tokens), width))
            if max(new.tokens) >= tokens:
                raise ConfigError(
                    f"{found.folder}: it changes token {max(new.tokens)} of {name!r}, but this "
                    f"model has {tokens} tokens: {self._other_base()}"
                )
        for name, tensor in self._biases():
            shape = self._shape(name, shapes.biases, "the bias of ")
            self._compare(name, "its bias", tensor.shape, shape)
        self._refuse_two_changes()

    def read(self, opened: Any, dtype: torch.dtype) -> AdapterTensors:
        """Read the tensors out of the opened file, in the model's dtype. Raises ConfigError for
        numbers that are not finite in it."""

        def tensor(stored: StoredTensor) -> torch.Tensor:
            found = opened.get_tensor(stored.name).to(dtype, copy=True)  # it is mapped
            if not found.isfinite().all():
                raise ConfigError(
                    f"{stored.file}: tensor {stored.name!r} holds numbers that are not finite in "
                    f"{str(dtype).removeprefix('torch.')}; save the adapter again"
                )
            return found

        def low_rank(pair: LowRankPair) -> LowRank:
            return LowRank(tensor(pair.a), tensor(pair.b), pair.scale)

        found, shapes = self._found, self._shapes
        result = AdapterTensors({}, {}, {}, {}, {})
        for name, pair in found.modules.items():
            if name in self._experts:
                result.matrices.update(self._of_experts(name, pair.num_experts, low_rank(pair)))
            else:
                result.matrices[shapes.name_of(name, shapes.projections)] = low_rank(pair)
        for name, pair in found.tables.items():
            result.tables[shapes.name_of(name, shapes.tables)] = low_rank(pair)
        for name, stored in found.whole.items():
            result.whole[shapes.name_of(name, shapes.whole)] = tensor(stored)
        for name, new in found.tokens.items():
            rows = NewRows(torch.tensor(new.tokens), tensor(new.rows))
            result.rows.update(dict.fromkeys(self._with_rows_of(name), rows))
        for name, stored in self._biases():
            result.biases[shapes.name_of(name, shapes.biases)] = tensor(stored)
        return result

    def _with_rows_of(self, name: str) -> list[str]:
        """The table or head, and the head that shares its rows unless it has new ones itself."""
        shapes = self._shapes
        others = {shapes.name_of(each, shapes.whole) for each in self._found.tokens if each != name}
        itself, *sharing = shapes.with_rows_of(name)
        return [itself, *(module for module in sharing if module not in others)]

    def _refuse_two_changes(self) -> None:
        """Raises ConfigError for a module whose place would hold the last of its changes alone."""
        found, shapes = self._found, self._shapes
        changed = Counter(
            shapes.name_of(name, known)
            for names, known in (
                ([n for n in found.modules if n not in self._experts], shapes.projections),
                (found.tables, shapes.tables),
                (found.whole, shapes.whole),
            )
            for name in names
        )
        changed.update(module for name in found.tokens for module in self._with_rows_of(name))
        for module, count in changed.items():
            if count > 1:
                raise ConfigError(
                    f"{found.folder}: it changes {module!r} in two ways (of low-rank matrices, a "
                    "whole weight and new rows of tokens), and one would be lost; train it with "
                    "one of them, or merge it into the model"
                )

    def _biases(self) -> Iterator[tuple[str, StoredTensor]]:
        for name, stored in self._found.biases.items():
            if not self._shapes.is_ignored(f"{name}.bias"):
                yield name, stored

    def _check(self, name: str, pair: LowRankPair, known: Mapping[str, Shape | None]) -> None:
        shape = self._shape(name, known)
        outputs, inputs = pair.b.shape[0], pair.a.shape[1]
        self._compare(name, "outputs and inputs", (outputs, inputs), shape)

    def _shape(self, name: str, known: Mapping[str, Shape | None], what: str = "") -> Shape:
        module = self._shapes.name_of(name, known)
        if module not in known:
            raise ConfigError(
                f"{self._found.folder}: it changes {what}{name!r}, which this model has not: "
                f"{self._other_base()}"
            )
        shape = known[module]
        if shape is None:
            raise ConfigError(
                f"{self._found.folder}: it changes {what}{name!r}, which adapters cannot change "
                "here; train it on projections of the blocks, or merge it into the model"
            )
        return shape

    def _check_experts(self, name: str, pair: LowRankPair) -> ExpertMatrix:
        """Return the parameter that a module of all experts changes. Its name does not say which
        one that is: shapes do."""
        matrices = self._shapes.experts_of(name)
        if not matrices:
            raise ConfigError(
                f"{self._found.folder}: it changes the experts {name!r}, which this model has not: "
                f"{self._other_base()}"
            )
        shape = pair.b.shape[0], pair.a.shape[1]
        for matrix in matrices:
            if len(matrix.parts) == pair.num_experts and shape in (
                matrix.shape,
                matrix.shape[::-1],
            ):
                return matrix
        shapes = " or ".join(f"{len(m.parts)} x {list(m.shape)}" for m in matrices)
        raise ConfigError(
            f"{self._found.folder}: {name!r} has matrices for {pair.num_experts or 1} x "
            f"{list(shape)} outputs and inputs, but experts have {shapes} in this model: "
            f"{self._other_base()}"
        )

    def _of_experts(
        self, name: str, num_experts: int | None, whole: LowRank
    ) -> Iterator[tuple[str, LowRank]]:
        """The matrices of each expert's projections."""
        matrix, count = self._experts[name], num_experts or 1
        of_a = whole.a.view(count, -1, whole.a.shape[1])
        of_b = whole.b.view(len(whole.b), -1, count).permute(2, 0, 1)
        shape, stacked = (of_b.shape[1], of_a.shape[2]), matrix.stacked
        is_square = shape[0] == shape[1]
        is_swapped = self._found.swaps_experts and not stacked.is_transposed
        if shape != matrix.shape or (is_square and is_swapped):
            of_a, of_b = of_b.transpose(1, 2), of_a.transpose(1, 2)
        for a, b, modules in zip(of_a, of_b, matrix.parts, strict=True):
            n = len(modules)
            for part, module in enumerate(modules):
                rows = b[part::n] if stacked.interleaved else b.chunk(n)[part]
                yield module, LowRank(a.contiguous(), rows.contiguous(), whole.scale)

    def _compare(
        self, name: str, what: str, shape: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        if shape != expected:
            raise ConfigError(
                f"{self._found.folder}: {what} of {name!r} are {list(shape)}, but "
                f"{list(expected)} in this model: {self._other_base()}"
            )

    def _other_base(self) -> str:
        return (
            f"the adapter is of another base model ({self._found.base or 'it does not say which'})"
        )
