"""A matrix as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from quire.config.packed import PackedLayout
from quire.config.packed.schemes import (
    AWQ,
    GPTQ,
    MXFP4,
    BitsAndBytes4,
    BitsAndBytes8,
    Float8,
    GGUFBlocks,
    PackedIntegers,
    PlainIntegers,
    SqueezeLLM,
)
from quire.errors import ConfigError
from quire.ops.linear.blocks.contract import Blocks
from quire.ops.linear.tables.contract import Tables
from quire.quantization.gguf.tensor_types import blocks_of
from quire.quantization.packed.awq import awq
from quire.quantization.packed.bitsandbytes import bits_and_bytes_4, bits_and_bytes_8
from quire.quantization.packed.compressed_tensors import (
    UNSET,
    packed_integers,
    plain_integers,
)
from quire.quantization.packed.cuts import CUTS, Part, UncutError
from quire.quantization.packed.float8 import float8
from quire.quantization.packed.gptq import gptq
from quire.quantization.packed.integers import Integers
from quire.quantization.packed.mxfp4 import mxfp4
from quire.quantization.packed.squeezellm import squeezellm

__all__ = ["DEFINITIONS", "StoredMatrix", "numbers_of"]

SLICE_NUMBERS = 1 << 20
"""Numbers that exist in float32 at a time, about what caches hold."""

LARGEST_EXPONENT = 254
"""Largest power of two in 8 bits: 255 stands for NaN."""

ALIGNMENT = 32
"""Outputs at whose multiples every format can be cut."""


def gguf_blocks(scheme: GGUFBlocks, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Blocks:
    """Follow the definition of the type in `quire.quantization.gguf`."""
    return blocks_of(scheme.kind, tensors["blocks"][outputs])


DEFINITIONS: Mapping[type, Callable[..., Blocks | Integers | Tables]] = MappingProxyType(
    {
        AWQ: awq,
        GPTQ: gptq,
        MXFP4: mxfp4,
        BitsAndBytes4: bits_and_bytes_4,
        BitsAndBytes8: bits_and_bytes_8,
        Float8: float8,
        GGUFBlocks: gguf_blocks,
        PackedIntegers: packed_integers,
        PlainIntegers: plain_integers,
        SqueezeLLM: squeezellm,
    }
)
"""Definitions by scheme. Each makes some outputs from the scheme, its tensors, and the choice of
outputs (a slice whose ends are multiples of `ALIGNMENT`, or the last output)."""


class StoredMatrix:
    """A matrix [outputs, inputs]. tensors: as stored, by what follows the module's name. order:
    index in them of each output, int64 [outputs]; None if they keep their order."""

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
    def kernel(self) -> str | None:
        """The format in memory, by `PackedLayout.kernel_on` the device of the tensors."""
        return self.layout.kernel_on(next(iter(self._tensors.values())).device.type)

    def to(self, device: torch.device) -> StoredMatrix:
        """The same with tensors of its own on `device`, all but settings, which the host reads."""
        own = {
            kind: tensor.clone() if ".quant_state." in kind else tensor.to(device, copy=True)
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
            tensors = CUTS[type(layout.scheme)](layout.scheme, self._tensors, part)
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
        """The whole matrix as its definition has it."""
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
        return self._define(slice(start, stop)).numbers()[first - start : past - start]

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
        outputs, inputs = self.shape
        groups = "scales" if "g_idx" in self._tensors else "weight_scale"
        bounds = {"cols": inputs, "full_row_indices": outputs}
        for kind in ("g_idx", "weight_g_idx"):
            if kind in self._tensors:
                bounds[kind] = self.layout.tensors[groups].num_elements // outputs
        for kind, bound in bounds.items():
            self._check_range(kind, UNSET if kind == "weight_g_idx" else 0, bound - 1)
        if isinstance(self.layout.scheme, PlainIntegers) and self.layout.scheme.bits == 4:
            self._check_range("weight", -8, 7)
        for kind in ("weight_scale", "weight_scales"):
            if kind in self._tensors and self._tensors[kind].dtype == torch.uint8:
                self._check_range(kind, 0, LARGEST_EXPONENT)
        rows = self._tensors.get("rows")
        if rows is not None:
            ends = (int(rows[0]), int(rows[-1]))
            if ends != (0, len(self._tensors["cols"])) or bool((rows.diff() < 0).any()):
                raise self._broken("rows", "ends of rows that are out of order")

    def _check_range(self, kind: str, low: int, high: int) -> None:
        tensor = self._tensors.get(kind)
        if tensor is not None and tensor.numel():
            smallest, largest = (int(end) for end in tensor.aminmax())
            if smallest < low or largest > high:
                worst = smallest if smallest < low else largest
                raise self._broken(kind, f"{worst}, which is not in {low} to {high}")

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
        scheme = self.layout.scheme
        define: Any = DEFINITIONS[type(scheme)]
        found = define(scheme, self._tensors, outputs)
        if isinstance(scheme, GGUFBlocks) and not found.is_finite():
            raise self._broken("blocks", "scales that are not finite")
        return found


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
