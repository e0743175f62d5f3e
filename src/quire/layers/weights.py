"""What the loader asks of every layer that has weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.errors import EngineError
from quire.ops import PackedMatrix

__all__ = ["DenseWeights", "LayerWeights", "PackedWeights", "WeightedLayer"]


class LayerWeights(Protocol):
    """The weights of one layer, filled part by part, so that a format may pack each as it comes.

    A part is named as in the checkpoint, below the layer's own name: "weight", "bias", and
    "<part>.weight" in a merged layer.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every part that must be loaded, with its shape on disk."""
        ...

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Take one part, of the shape that `shapes` states; `tensor` is not kept."""
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
    is stored transposed. offset: what is added to each element. is_loaded: whether all parts are.
    """

    def __init__(self, storage: Mapping[str, torch.Tensor], offset: float = 0.0) -> None:
        self._storage = storage
        self._offset = offset
        self.is_loaded = False

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {part: tuple(tensor.shape) for part, tensor in self._storage.items()}

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._storage[part].copy_(tensor.float() + self._offset if self._offset else tensor)

    def finish(self) -> None:
        self.is_loaded = True


class PackedWeights:
    """A matrix and its bias, kept as they come until the last part, then packed and let go.

    While a model loads, one layer at a time exists twice.

    pack: of the format in which the layer keeps its matrix. weight [O, I], bias [O]: empty, to be
    filled. storage: by part, the slice or view of them to copy into.
    """

    def __init__(
        self,
        pack: Callable[..., PackedMatrix],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        storage: Mapping[str, torch.Tensor],
    ) -> None:
        self._shapes = {part: tuple(tensor.shape) for part, tensor in storage.items()}
        self._pack = pack
        self._plain: _Plain | None = _Plain(weight, bias, storage)
        self._matrix: PackedMatrix | None = None

    @property
    def matrix(self) -> PackedMatrix:
        """Raises EngineError before `finish`."""
        if self._matrix is None:
            raise EngineError("A layer was used before its weights were loaded; this is a bug.")
        return self._matrix

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

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
