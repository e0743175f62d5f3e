"""Reads the weights of GGUF files by rows, as blocks or as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from quire.compute.quantization.mapped_file import MappedFile
from quire.config.gguf import GGUFLayout
from quire.config.media.image_spec import NUM_CHANNELS
from quire.config.packed.gguf.read import dequantize

__all__ = ["GGUFReader"]

SLICE_NUMBERS = 1 << 22
"""Numbers that are dequantized at a time, so that little is in memory in float32."""


class GGUFReader:
    """One file, mapped while the reader is open.

    Rows come in the order of the Hugging Face tensor, which for q and k of a Llama is not that of
    the file. A row is a whole number of blocks, so raw blocks can be had in that order too: a
    format that keeps a type's bits takes `blocks`, all others take `numbers`.
    """

    def __init__(self, file: Path) -> None:
        self._file = MappedFile(file)

    def blocks(self, layout: GGUFLayout, first: int = 0, past: int | None = None) -> torch.Tensor:
        """Rows `first` to `past` as they are stored, uint8 [rows, bytes per row]. A tensor of one
        dimension is one row; of more than two, its leading ones count together as rows."""
        entry = layout.entry
        num_rows = _num_rows(layout)
        stored = self._file.bytes[entry.start : entry.end].view(num_rows, -1)
        if not layout.paired_heads or len(entry.shape) == 1:
            return stored[first:past]
        return stored[_paired_order(num_rows, layout.paired_heads)[first:past]]

    def numbers(self, layout: GGUFLayout, first: int = 0, past: int | None = None) -> torch.Tensor:
        """Rows `first` to `past` of the Hugging Face tensor, float32 [rows, columns]."""
        numbers = dequantize(layout.entry.kind.name, self.blocks(layout, first, past))
        if layout.frames:
            others = (replace(layout, entry=entry, frames=()) for entry in layout.frames)
            frames = [numbers, *(self.numbers(each, first, past) for each in others)]
            channels = [each.unflatten(1, (NUM_CHANNELS, -1)) for each in frames]
            return torch.stack(channels, dim=2).flatten(1)
        if layout.paired_heads and len(layout.entry.shape) == 1:
            numbers = numbers[:, _paired_order(numbers.shape[1], layout.paired_heads)]
        if layout.is_rate:
            return numbers.neg().log()
        return numbers - 1 if layout.adds_one else numbers

    def slices(self, layout: GGUFLayout) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows, some at a time: index of the first, and `numbers`."""
        num_rows = _num_rows(layout)
        step = max(1, SLICE_NUMBERS // layout.entry.shape[-1])
        for first in range(0, num_rows, step):
            yield first, self.numbers(layout, first, min(first + step, num_rows))

    def release(self, layout: GGUFLayout) -> None:
        """See `MappedFile.release`."""
        self._file.release(layout.entry.start, layout.entry.end)


def _num_rows(layout: GGUFLayout) -> int:
    return math.prod(layout.entry.shape[:-1])


def _paired_order(num_rows: int, heads: int) -> torch.Tensor:
    """Return the place of each row on disk: a head's rows are there in pairs, one of each half."""
    return torch.arange(num_rows).view(heads, -1, 2).swapaxes(1, 2).flatten()
