"""What the loader asks of every layer that has weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch

from quire.config.shard import Share
from quire.errors import EngineError

__all__ = ["Cut", "DenseWeights", "LayerWeights", "PackedWeights", "Sliceable", "WeightedLayer"]


class Sliceable(Protocol):
    """A tensor in memory, or in a file that reads what it is asked for."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of a checkpoint tensor: `share` of dimension `dim`."""

    dim: int
    share: Share

    def shape_on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor; `shape`: of the part."""
        return (*shape[: self.dim], self.share.total, *shape[self.dim + 1 :])

    def index_on_disk(self, index: int) -> int:
        """Where in the whole dimension the part's `index` stands."""
        return [i for each in self.share.ranges for i in each][index]

    def of(self, tensor: Sliceable) -> torch.Tensor:
        """The part; nothing else of `tensor` is read."""
        before = (slice(None),) * self.dim
        parts = [tensor[*before, slice(each.start, each.stop)] for each in self.share.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


_UNCUT: Mapping[str, Cut] = MappingProxyType({})


class LayerWeights(Protocol):
    """The weights of one layer, filled part by part, so that a format may pack each as it comes.

    A part is named as in the checkpoint, below the layer's own name: "weight", "bias", and
    "<part>.weight" in a merged layer.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every part that must be loaded, with its shape on disk."""
        ...

    def cut(self, part: str) -> Cut | None:
        """What of the tensor on disk is loaded; None for all of it."""
        ...

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Take one part, of the shape that `shapes` states, or of its cut; `tensor` is not kept."""
        ...

    def finish(self) -> None:
        """Called once, after the last part."""
        ...


class WeightedLayer(Protocol):
    """A layer that the loader fills."""

    @property
    def weights(self) -> LayerWeights: ...


class DenseWeights:
    """Weights kept as they come, in the dtype of their storage.

    storage: by part, the tensor to copy into; a view if the part is a slice of a merged weight or
    is stored transposed. offset: what is added to each element. cuts: by part, if the storage has
    not all of the tensor. is_loaded: whether all parts are.
    """

    def __init__(
        self,
        storage: Mapping[str, torch.Tensor],
        offset: float = 0.0,
        cuts: Mapping[str, Cut] = _UNCUT,
    ) -> None:
        self._storage = storage
        self._offset = offset
        self._cuts = cuts
        self.is_loaded = False

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _shapes_on_disk(self._storage, self._cuts)

    def cut(self, part: str) -> Cut | None:
        return self._cuts.get(part)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._storage[part].copy_(tensor.float() + self._offset if self._offset else tensor)

    def finish(self) -> None:
        self.is_loaded = True


Matrix = TypeVar("Matrix")


class PackedWeights(Generic[Matrix]):
    """A matrix and its bias, kept as they come until the last part, then packed and let go.

    While a model loads, one layer at a time exists twice.

    pack: of the format in which the layer keeps its matrix. weight [O, I], bias [O]: empty, to be
    filled. storage: by part, the slice or view of them to copy into. cuts: as in `DenseWeights`.
    """

    def __init__(
        self,
        pack: Callable[[torch.Tensor, torch.Tensor | None], Matrix],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        storage: Mapping[str, torch.Tensor],
        cuts: Mapping[str, Cut] = _UNCUT,
    ) -> None:
        self._shapes, self._cuts = _shapes_on_disk(storage, cuts), cuts
        self._pack = pack
        self._plain: _Plain | None = _Plain(weight, bias, storage)
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        """Raises EngineError before `finish`."""
        if self._matrix is None:
            raise EngineError("A layer was used before its weights were loaded; this is a bug.")
        return self._matrix

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def cut(self, part: str) -> Cut | None:
        return self._cuts.get(part)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Raises EngineError after `finish`."""
        if self._plain is None:
            raise EngineError(f"Weight part {part!r} came after the last one; this is a bug.")
        self._plain.storage[part].copy_(tensor)

    def finish(self) -> None:
        if self._plain is not None:
            self._matrix = self._pack(self._plain.weight, self._plain.bias)
            self._plain = None


@dataclass(frozen=True, slots=True)
class _Plain:
    weight: torch.Tensor
    bias: torch.Tensor | None
    storage: Mapping[str, torch.Tensor]


def _shapes_on_disk(
    storage: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]
) -> Mapping[str, tuple[int, ...]]:
    shapes = {part: tuple(tensor.shape) for part, tensor in storage.items()}
    return shapes | {part: cut.shape_on_disk(shapes[part]) for part, cut in cuts.items()}
