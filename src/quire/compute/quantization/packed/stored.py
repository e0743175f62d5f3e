"""A matrix as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType

import torch

from quire.base.errors import ConfigError
from quire.config.packed import PackedLayout
from quire.config.packed.read import ALIGNMENT, BrokenError, Integers, Part, Reading, UncutError
from quire.config.packed.settings import FORMATS
from quire.ops.linear.blocks.contract import Blocks
from quire.ops.linear.rotate.reference import rotate
from quire.ops.linear.tables.contract import Tables

__all__ = ["StoredMatrix", "numbers_of"]

SLICE_NUMBERS = 1 << 20
"""Numbers that exist in float32 at a time, about what caches hold."""


def _readings_of(place: str) -> Mapping[type, Reading]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


READINGS: Mapping[type, Reading] = MappingProxyType(
    {
        scheme: reading
        for each in FORMATS
        if each.readings is not None
        for scheme, reading in _readings_of(each.readings).items()
    }
)
"""Readings of all formats, by scheme."""


class StoredMatrix:
    """A matrix [outputs, inputs]. tensors: stored tensors, by the end of their names after the
    module's. order: index in them of each output, int64 [outputs]; None if they keep their order.
    """

    def __init__(
        self,
        layout: PackedLayout,
        tensors: Mapping[str, torch.Tensor],
        order: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self._tensors, self._order = tensors, order

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.outputs, self.layout.inputs

    @property
    def _reading(self) -> Reading:
        return READINGS[type(self.layout.scheme)]

    @property
    def kernel(self) -> str | None:
        """The format in memory, by `PackedLayout.kernel_on` the device of the tensors."""
        return self.layout.kernel_on(next(iter(self._tensors.values())).device.type)

    def to(self, device: torch.device) -> StoredMatrix:
        """The same with tensors of its own on `device`, all but settings, which the host reads."""
        settings = self.layout.scheme.settings
        own = {
            kind: tensor.clone() if kind in settings else tensor.to(device, copy=True)
            for kind, tensor in self._tensors.items()
        }
        order = None if self._order is None else self._order.to(device)
        return StoredMatrix(self.layout, own, order)

    def reordered(self, order: torch.Tensor) -> StoredMatrix:
        """The same outputs in another order: the index here of each, int64 [outputs]."""
        before = self._order
        return StoredMatrix(self.layout, self._tensors, order if before is None else before[order])

    def cut(self, outputs: range, inputs: range) -> StoredMatrix:
        """These outputs and inputs, of the same numbers; before outputs are reordered. Raises
        ConfigError where the format cannot be cut."""
        assert self._order is None, "ranks reorder what they have"
        layout = self.layout
        part = Part(outputs, inputs, self.shape)
        try:
            if any(edge % layout.rotation for edge in (inputs.start, inputs.stop)):
                raise UncutError(
                    f"inputs {inputs.start} to {inputs.stop}; it can be at multiples of "
                    f"{layout.rotation}, which are rotated together"
                )
            tensors = self._reading.cut(layout.scheme, self._tensors, part)
        except UncutError as error:
            raise ConfigError(
                f"{layout.module} in the format {layout.scheme.name} cannot be cut for ranks at "
                f"{error}. Use another number of ranks, or quantization= to make other bits."
            ) from error
        own = {kind: tensor.contiguous() for kind, tensor in tensors.items()}
        stored = {
            kind: replace(
                layout.tensors[kind],
                shape=tuple(tensor.shape),
                end=layout.tensors[kind].start + tensor.nbytes,
            )
            for kind, tensor in own.items()
        }
        kernels = layout.scheme.kernels(len(inputs))
        sizes = {"outputs": len(outputs), "inputs": len(inputs)}
        return StoredMatrix(replace(layout, **sizes, tensors=stored, kernels=kernels), own)

    def defined(self) -> Blocks | Integers | Tables:
        """The whole matrix as its definition has it, which may be rotated."""
        pieces = [self._define(outputs) for outputs in self._cuts()]
        whole = type(pieces[0]).joined(pieces)  # type: ignore[arg-type]
        return whole if self._order is None else whole.taken(self._order)

    def numbers(self, first: int = 0, past: int | None = None) -> torch.Tensor:
        """Outputs `first` to `past`, float32 [R, I]."""
        past = self.layout.outputs if past is None else past
        if self._order is None:
            return self._stored_numbers(first, past)
        found = torch.empty(past - first, self.layout.inputs, device=self._order.device)
        stored, places = self._order[first:past].sort()
        unit = stored // ALIGNMENT
        breaks = (unit.diff() > 1).nonzero()[:, 0] + 1
        for run, place in zip(
            stored.tensor_split(breaks.cpu()), places.tensor_split(breaks.cpu()), strict=True
        ):
            low = int(run[0])
            found[place] = self._stored_numbers(low, int(run[-1]) + 1)[run - low]
        return found

    def _stored_numbers(self, first: int, past: int) -> torch.Tensor:
        """The numbers of outputs in the order of the tensors."""
        start = first // ALIGNMENT * ALIGNMENT
        stop = min(-(-past // ALIGNMENT) * ALIGNMENT, self.layout.outputs)
        found = self._define(slice(start, stop)).numbers()[first - start : past - start]
        return rotate(found, self.layout.rotation)  # back: twice is the size of a block

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All outputs, some at a time: index of the first, and `numbers`."""
        for outputs in self._cuts():
            yield outputs.start, self.numbers(outputs.start, outputs.stop)

    def check(self) -> None:
        """Raises ConfigError, naming file and tensor, for numbers that are not finite, and for
        places that do not exist."""
        for kind in self.layout.scheme.floats:
            tensor = self._tensors.get(kind)
            if tensor is not None and tensor.is_floating_point() and not _is_finite(tensor):
                raise self._broken(kind, "numbers that are not finite")
        check = self._reading.check
        if check is not None:
            try:
                check(self.layout.scheme, self._tensors, self.shape)
            except BrokenError as error:
                raise self._broken(error.kind, error.what) from error

    def _broken(self, kind: str, what: str) -> ConfigError:
        stored = self.layout.tensors[kind]
        return ConfigError(
            f"{stored.file}: tensor {stored.name!r} holds {what}; the file is damaged, or the "
            "model was saved broken: fetch the checkpoint again, or use another one"
        )

    def _cuts(self) -> Iterator[slice]:
        outputs, inputs = self.shape
        step = max(1, SLICE_NUMBERS // inputs // ALIGNMENT) * ALIGNMENT
        for first in range(0, outputs, step):
            yield slice(first, min(first + step, outputs))

    def _define(self, outputs: slice) -> Blocks | Integers | Tables:
        """Raises ConfigError for blocks whose scales are not finite."""
        try:
            return self._reading.define(self.layout.scheme, self._tensors, outputs)
        except BrokenError as error:
            raise self._broken(error.kind, error.what) from error


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of any float dtype is finite. One of 8 bits has no infinities, and
    NaN where all other bits are set."""
    if tensor.dtype == torch.float8_e4m3fn:
        return not bool((tensor.view(torch.uint8) & 127 == 127).any())
    pieces = tensor.reshape(-1).split(SLICE_NUMBERS)
    return all(bool(piece.float().isfinite().all()) for piece in pieces)


def numbers_of(parts: Sequence[StoredMatrix | torch.Tensor], first: int, past: int) -> torch.Tensor:
    """Outputs `first` to `past` of parts one below the other, float32 [R, I]."""
    found: list[torch.Tensor] = []
    start = 0
    for part in parts:
        size = part.shape[0]
        low, high = max(first - start, 0), min(past - start, size)
        if low < high:
            plain = isinstance(part, torch.Tensor)
            found.append(part[low:high].float() if plain else part.numbers(low, high))
        start += size
    return torch.cat(found)
