"""What the loader asks of every layer that has weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

__all__ = ["DenseWeights", "LayerWeights", "WeightedLayer"]


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
    is stored transposed.
    """

    def __init__(self, storage: Mapping[str, torch.Tensor]) -> None:
        self._storage = storage

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {part: tuple(tensor.shape) for part, tensor in self._storage.items()}

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._storage[part].copy_(tensor)

    def finish(self) -> None:
        """Nothing to pack."""
