"""What the loader asks of every layer that has weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.errors import EngineError
from quire.ops import PackedMatrix
from quire.quantization import StoredMatrix, WeightFormat

__all__ = ["DenseWeights", "LayerWeights", "PackedWeights", "WeightedLayer"]


class LayerWeights(Protocol):
    """The weights of one layer, filled part by part, so that a format may pack each as it comes.

    A part is named as in the checkpoint, below the layer's own name: "weight", "bias", and
    "<part>.weight" in a merged layer.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every part that must be loaded, with its shape on disk."""
        ...

    def stored_shape(self, part: str) -> tuple[int, ...]:
        """Of a part that comes as a quantized matrix: [outputs, inputs], whatever a plain one's
        order is."""
        ...

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Take one part, of the shape that `shapes` states; `tensor` is not kept."""
        ...

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        """Take one part that the checkpoint holds quantized, of the shape `stored_shape`."""
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
        self.offset = offset
        self.is_loaded = False

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {part: tuple(tensor.shape) for part, tensor in self._storage.items()}

    def stored_shape(self, part: str) -> tuple[int, ...]:
        return tuple(self._storage[part].shape)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        self._storage[part].copy_(tensor.float() + self.offset if self.offset else tensor)

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        for first, numbers in stored.slices():
            self._storage[part][first : first + len(numbers)] = numbers + self.offset

    def finish(self) -> None:
        self.is_loaded = True


class PackedWeights:
    """A matrix and its bias, kept as they come until the last part, then packed and let go.

    While a model loads, one layer at a time exists twice.

    weight_format: in which the layer keeps its matrix. parts: number of outputs by name, in their
    order; "" is the name of an only one. transposed: plain parts are [I, O] on disk. gate: of the
    first of two parts, as in `quire.ops.linear.plain`.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        inputs: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        transposed: bool = False,
        gate: str | None = None,
    ) -> None:
        self.weight_format = weight_format
        self._inputs, self._sizes = inputs, dict(parts)
        self._dtype, self._device = dtype, device
        self._has_bias, self.is_transposed, self._gate = bias, transposed, gate
        self._coming: _Coming | None = _Coming({}, None, None)
        self._matrix: PackedMatrix | None = None

    @property
    def matrix(self) -> PackedMatrix:
        """Raises EngineError before `finish`."""
        if self._matrix is None:
            raise EngineError("A layer was used before its weights were loaded; this is a bug.")
        return self._matrix

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self._sizes:
            shape = self.stored_shape(_named(part, "weight"))
            shapes[_named(part, "weight")] = shape[::-1] if self.is_transposed else shape
        if self._has_bias:
            shapes |= {_named(part, "bias"): (size,) for part, size in self._sizes.items()}
        return shapes

    def stored_shape(self, part: str) -> tuple[int, ...]:
        owner, _, kind = part.rpartition(".")
        size = self._sizes[owner]
        return (size, self._inputs) if kind == "weight" else (size,)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Raises EngineError after `finish`."""
        if self._coming is None:
            raise EngineError(f"Weight part {part!r} came after the last one; this is a bug.")
        owner, _, kind = part.rpartition(".")
        if kind == "bias":
            self._bias_of(owner).copy_(tensor)
        else:
            self._rows_of(owner).copy_(tensor.t() if self.is_transposed else tensor)

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        """As `load`: kept as it is, or widened, as the format says."""
        owner = part.rpartition(".")[0]
        if self.weight_format.keeps_stored:
            self._open.stored[owner] = stored.to(self._device)
            return
        rows = self._rows_of(owner)
        for first, numbers in stored.slices():
            rows[first : first + len(numbers)] = numbers

    def finish(self) -> None:
        coming = self._coming
        if coming is None:
            return
        if coming.stored:
            parts = [coming.stored.get(part) or self._rows_of(part) for part in self._sizes]
            self._matrix = self.weight_format.keep(parts, coming.bias, self._dtype, gate=self._gate)
        else:
            if coming.weight is None:
                raise EngineError("A layer was finished without its weight; this is a bug.")
            self._matrix = self.weight_format.pack(coming.weight, coming.bias, gate=self._gate)
        self._coming = None

    @property
    def _open(self) -> _Coming:
        if self._coming is None:
            raise EngineError("A layer was filled after its last part; this is a bug.")
        return self._coming

    def _rows_of(self, owner: str) -> torch.Tensor:
        """Where the plain weight of a part goes: [outputs, I]."""
        coming = self._open
        if coming.weight is None:
            coming.weight = self._empty(sum(self._sizes.values()), self._inputs)
        return self._of_part(coming.weight, owner)

    def _bias_of(self, owner: str) -> torch.Tensor:
        coming = self._open
        if coming.bias is None:
            coming.bias = self._empty(sum(self._sizes.values()))
        return self._of_part(coming.bias, owner)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _of_part(self, tensor: torch.Tensor, owner: str) -> torch.Tensor:
        return dict(zip(self._sizes, tensor.split(list(self._sizes.values())), strict=True))[owner]


@dataclass(slots=True)
class _Coming:
    """What has come of a layer: parts as they are stored, plain ones in one matrix, the bias."""

    stored: dict[str, StoredMatrix]
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def _named(part: str, kind: str) -> str:
    return f"{part}.{kind}" if part else kind
