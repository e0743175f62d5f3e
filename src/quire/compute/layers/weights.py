"""The interface between the loader and layers with weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import torch

from quire.base.errors import EngineError
from quire.compute.quantization import StoredMatrix
from quire.config.shard import Share

__all__ = [
    "Cut",
    "DenseWeights",
    "LayerWeights",
    "Outputs",
    "PackedWeights",
    "Placement",
    "WeightedLayer",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a checkpoint tensor that a rank takes: `share` of dimension `dim`."""

    dim: int
    share: Share

    def shape_on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor. `shape`: the part's."""
        return (*shape[: self.dim], self.share.total, *shape[self.dim + 1 :])

    def index_on_disk(self, index: int) -> int:
        """Return the index in the whole dimension of the part's `index`."""
        return [i for each in self.share.ranges for i in each][index]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part; nothing else of `tensor` is read."""
        before = (slice(None),) * self.dim
        parts = [tensor[*before, slice(each.start, each.stop)] for each in self.share.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


NO_ORDERS: Mapping[str, torch.Tensor] = MappingProxyType({})
_UNCUT: Mapping[str, Cut] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Placement:
    """Dtype and device of the weights of a layer."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a matrix that a rank has. parts: shares by name, in order; "" if there is only
    one. gate: activation of the first of two parts (`quire.ops.linear.plain`). num_outputs: number
    of outputs if larger than the rank's share; the others are zero. orders: index on disk of each
    of the rank's outputs, int64 [outputs], by part; parts without one keep their order."""

    parts: Mapping[str, Share]
    gate: str | None = None
    num_outputs: int | None = None
    orders: Mapping[str, torch.Tensor] = field(default_factory=lambda: NO_ORDERS)

    @property
    def count(self) -> int:
        """Number of the rank's own outputs."""
        return sum(share.count for share in self.parts.values())


class LayerWeights(Protocol):
    """The weights of one layer, filled part by part, so that a format can pack each part as it
    arrives.

    A part is named as in the checkpoint, below the layer's own name: "weight", "bias", and
    "<part>.weight" in a merged layer.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every part that must be loaded, with its shape on disk."""
        ...

    def cut(self, part: str) -> Cut | None:
        """Return the cut of the tensor on disk that is loaded; None for the whole tensor."""

    def stored_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of a part that is stored quantized: [outputs, inputs], whatever the
        order of a plain one."""
        ...

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Take one part, of the shape that `shapes` states or of its cut. `tensor` is not kept."""
        ...

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        """Take one part that the checkpoint stores quantized, of the shape `stored_shape`."""
        ...

    def finish(self) -> None:
        """Called once, after the last part."""
        ...


class WeightedLayer(Protocol):
    """A layer that the loader fills."""

    @property
    def weights(self) -> LayerWeights: ...


class DenseWeights:
    """Weights kept as they are stored, in the dtype of `storage`.

    storage: the tensor to copy each part into; a view if the part is a slice of a merged weight or
    stored transposed. offset: added to each element except biases. cuts: the cut of each part whose
    storage has only a piece of the tensor. is_loaded: True once all parts are loaded.
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

    def part(self, name: str) -> torch.Tensor:
        """The loaded weights of this part."""
        return self._storage[name]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return _shapes_on_disk(self._storage, self._cuts)

    def cut(self, part: str) -> Cut | None:
        return self._cuts.get(part)

    def stored_shape(self, part: str) -> tuple[int, ...]:
        return self.shapes()[part]

    def offset(self, part: str) -> float:
        """Return the offset added to each element of a part."""
        return 0.0 if part == "bias" else self._offset

    def load(self, part: str, tensor: torch.Tensor) -> None:
        offset = self.offset(part)
        self._storage[part].copy_(tensor.float() + offset if offset else tensor)

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        if (cut := self._cuts.get(part)) is not None:
            self._storage[part].copy_(cut.of(_widened(stored)) + self.offset(part))
            return
        for first, numbers in stored.slices():
            self._storage[part][first : first + len(numbers)] = numbers + self.offset(part)

    def finish(self) -> None:
        self.is_loaded = True


Matrix = TypeVar("Matrix", covariant=True)


class MatrixForm(Protocol[Matrix]):
    """A way to store a matrix: a `WeightFormat`, or one for some of its inputs."""

    @property
    def keeps_stored(self) -> bool:
        """True if matrices stay as stored, as in `WeightFormat`."""
        ...

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> Matrix:
        """Pack a matrix, as in `WeightFormat`."""
        ...

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> Matrix:
        """Keep a stored matrix, as in `WeightFormat`."""
        ...


class PackedWeights(Generic[Matrix]):
    """A matrix and its bias, kept as they arrive until the last part, then packed and released.

    While a model loads, one layer at a time exists twice. weight_format: format of the packed
    matrix. inputs: share of this rank. transposed: plain parts are [I, O] on disk.
    """

    def __init__(
        self,
        weight_format: MatrixForm[Matrix],
        inputs: Share,
        outputs: Outputs,
        placement: Placement,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        self.orders = outputs.orders
        self.weight_format = weight_format
        self._inputs, self._parts = inputs, dict(outputs.parts)
        self._num_own = outputs.count
        self._height = outputs.num_outputs or self._num_own
        self._placement = placement
        self._has_bias, self.is_transposed, self._gate = bias, transposed, outputs.gate
        self._coming: _Coming | None = _Coming({}, None, None)
        self._matrix: Matrix | None = None
        self._bias: torch.Tensor | None = None

    @property
    def bias(self) -> torch.Tensor:
        """The bias of all outputs. Raises EngineError if there is none, or before `finish`."""
        if self._bias is None:
            raise EngineError("A layer was asked for a bias that it has not; this is a bug.")
        return self._bias

    @property
    def matrix(self) -> Matrix:
        """Raises EngineError before `finish`."""
        if self._matrix is None:
            raise EngineError("A layer was used before its weights were loaded; this is a bug.")
        return self._matrix

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part in self._parts:
            shape = self.stored_shape(_named(part, "weight"))
            shapes[_named(part, "weight")] = shape[::-1] if self.is_transposed else shape
        if self._has_bias:
            shapes |= {_named(part, "bias"): (share.total,) for part, share in self._parts.items()}
        return shapes

    def stored_shape(self, part: str) -> tuple[int, ...]:
        owner, _, kind = part.rpartition(".")
        size = self._parts[owner].total
        return (size, self._inputs.total) if kind == "weight" else (size,)

    def cut(self, part: str) -> Cut | None:
        owner, _, kind = part.rpartition(".")
        if kind == "bias":
            outputs = self._parts[owner]
            return None if outputs.is_whole else Cut(0, outputs)
        cut = self._cut_of_rows(owner)
        return cut if cut is None or not self.is_transposed else Cut(1 - cut.dim, cut.share)

    def _cut_of_rows(self, owner: str) -> Cut | None:
        """Return the cut of a weight [outputs, inputs]; ranks share one of the two."""
        if not self._inputs.is_whole:
            return Cut(1, self._inputs)
        outputs = self._parts[owner]
        return None if outputs.is_whole else Cut(0, outputs)

    def load(self, part: str, tensor: torch.Tensor) -> None:
        """Raises EngineError after `finish`."""
        if self._coming is None:
            raise EngineError(f"Weight part {part!r} came after the last one; this is a bug.")
        owner, _, kind = part.rpartition(".")
        tensor = tensor.t() if self.is_transposed and kind != "bias" else tensor
        if (order := self.orders.get(owner)) is not None:
            tensor = tensor[order]
        (self._bias_of(owner) if kind == "bias" else self._rows_of(owner)).copy_(tensor)

    def load_stored(self, part: str, stored: StoredMatrix) -> None:
        """Load a quantized part: the rank's share of its bits, or its values if the format requires
        that, or outputs that are apart on disk are reordered. Raises ConfigError for a share at
        which the checkpoint's format cannot be divided."""
        owner = part.rpartition(".")[0]
        order = self.orders.get(owner)
        is_one = order is None or len(_joined(self._parts[owner].ranges)) == 1
        if self.weight_format.keeps_stored and is_one and self._height == self._num_own:
            shares = self._shares_of(owner, stored)
            if order is not None:
                shares = [each.reordered(order) for each in shares]
            self._open.stored[owner] = [each.to(self._placement.device) for each in shares]
            return
        rows, cut = self._rows_of(owner), self._cut_of_rows(owner)
        if cut is not None or order is not None:
            numbers = _widened(stored)
            numbers = numbers if cut is None else cut.of(numbers)
            rows.copy_(numbers if order is None else numbers[order])
            return
        for first, numbers in stored.slices():
            rows[first : first + len(numbers)] = numbers

    def _shares_of(self, owner: str, stored: StoredMatrix) -> list[StoredMatrix]:
        """Return the rank's outputs and inputs of a matrix, one part for each range."""
        if self._cut_of_rows(owner) is None:
            return [stored]
        outputs, inputs = _joined(self._parts[owner].ranges), self._inputs.ranges
        return [stored.cut(rows, columns) for rows in outputs for columns in inputs]

    def finish(self) -> None:
        coming = self._coming
        if coming is None:
            return
        if coming.stored:
            parts = [
                each
                for part in self._parts
                for each in coming.stored.get(part) or [self._rows_of(part)]
            ]
            dtype = self._placement.dtype
            self._matrix = self.weight_format.keep(parts, coming.bias, dtype, gate=self._gate)
        else:
            if coming.weight is None:
                raise EngineError("A layer was finished without its weight; this is a bug.")
            self._matrix = self.weight_format.pack(coming.weight, coming.bias, gate=self._gate)
        self._bias, self._coming = coming.bias, None

    @property
    def _open(self) -> _Coming:
        if self._coming is None:
            raise EngineError("A layer was filled after its last part; this is a bug.")
        return self._coming

    def _rows_of(self, owner: str) -> torch.Tensor:
        """Return the rows for the plain weight of a part: [outputs, I]."""
        coming = self._open
        if coming.weight is None:
            coming.weight = self._empty(self._height, self._inputs.count)
        return self._of_part(coming.weight, owner)

    def _bias_of(self, owner: str) -> torch.Tensor:
        coming = self._open
        if coming.bias is None:
            coming.bias = self._empty(self._height)
        return self._of_part(coming.bias, owner)

    def _empty(self, *shape: int) -> torch.Tensor:
        empty = self._placement.empty(*shape)
        empty[self._num_own :].zero_()
        return empty

    def _of_part(self, tensor: torch.Tensor, owner: str) -> torch.Tensor:
        sizes = [share.count for share in self._parts.values()]
        views = tensor[: self._num_own].split(sizes)
        return dict(zip(self._parts, views, strict=True))[owner]


@dataclass(slots=True)
class _Coming:
    """The arrived parts of a layer: quantized parts, plain ones in one matrix, the bias."""

    stored: dict[str, list[StoredMatrix]]
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def _named(part: str, kind: str) -> str:
    return f"{part}.{kind}" if part else kind


def _joined(ranges: Sequence[range]) -> list[range]:
    """Return the ranges with neighbours in one."""
    found: list[range] = []
    for each in ranges:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return found


def _widened(stored: StoredMatrix) -> torch.Tensor:
    return torch.cat([numbers for _, numbers in stored.slices()])


def _shapes_on_disk(
    storage: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]
) -> Mapping[str, tuple[int, ...]]:
    shapes = {part: tuple(tensor.shape) for part, tensor in storage.items()}
    return shapes | {part: cut.shape_on_disk(shapes[part]) for part, cut in cuts.items()}
