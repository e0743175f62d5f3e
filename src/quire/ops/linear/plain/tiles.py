"""Cuts of the product in Triton: tiles of the result, and pieces of the sum (split-K)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.ops.native.row_blocks import power_of_two

__all__ = ["MAX_FEW_ROWS", "Tiles", "candidates", "default_tiles", "invariant_tiles"]

MAX_FEW_ROWS = 64
"""Up to this many rows, reading the weight takes longer than multiplying by it: 2 · 64 operations
per weight of 16 bits are fewer than a GPU does while it reads the weight (about 180 per byte on an
H200)."""

MIN_TILE_ROWS = 16
"""Rows of the smallest tile of tensor cores."""

_SHAPES = ((32, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4))
"""Columns, depth, warps and stages of tiles for few rows. Three stages of 10 to 24 KiB are loading
while one is multiplied, and fit in shared memory with 64 rows."""

_PROGRAMS_PER_PROCESSOR = (1, 3)
_INVARIANT_PROGRAMS = 256
_INVARIANT_ROWS, _INVARIANT_COLUMNS, _INVARIANT_DEPTH_BYTES = 64, 128, 128

_HALF = 2
"""Bytes of the elements for which `_SHAPES` are made."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program computes rows × columns of the result, `depth` inputs at a time. pieces: parts of
    the sum over all inputs, each summed on its own and then added in order. max_split_rows: up to
    this many rows in all, each piece has a program of its own; with more rows, one program does all
    pieces of its tile, in the same order and with the same bits."""

    rows: int
    columns: int
    depth: int
    pieces: int
    warps: int
    stages: int
    max_split_rows: int = MAX_FEW_ROWS


def candidates(
    num_rows: int, outputs: int, depth: int, processors: int, itemsize: int = _HALF
) -> Iterator[Tiles]:
    """Yield the cuts worth a measurement for up to `num_rows` rows. processors: number of the GPU's
    multiprocessors. itemsize: bytes of an element; elements wider than 16 bits make flatter tiles.
    """
    rows = max(MIN_TILE_ROWS, power_of_two(num_rows))
    seen: set[Tiles] = set()
    for columns, half_depth, warps, stages in _SHAPES:
        tile_depth = half_depth * _HALF // max(_HALF, itemsize)
        for per_processor in _PROGRAMS_PER_PROCESSOR:
            wanted = processors * per_processor / -(-outputs // columns)
            pieces = _pieces(wanted, depth, tile_depth)
            tiles = Tiles(rows, columns, tile_depth, pieces, warps, stages)
            if tiles not in seen:
                seen.add(tiles)
                yield tiles


def default_tiles(
    num_rows: int, outputs: int, depth: int, processors: int, itemsize: int = _HALF
) -> Tiles:
    """Return a cut without a measurement: about one program per processor."""
    return next(candidates(num_rows, outputs, depth, processors, itemsize))


def invariant_tiles(outputs: int, depth: int, itemsize: int = _HALF) -> Tiles:
    """Return one cut for any number of rows, chosen by the matrix alone, so that a row's sums have
    one order. Tiles of other shapes use other instructions, which add in other orders."""
    wanted = _INVARIANT_PROGRAMS / -(-outputs // _INVARIANT_COLUMNS)
    tile_depth = _INVARIANT_DEPTH_BYTES // itemsize
    pieces = _pieces(wanted, depth, tile_depth)
    return Tiles(_INVARIANT_ROWS, _INVARIANT_COLUMNS, tile_depth, pieces, 4, 3, 256)


def _pieces(wanted: float, depth: int, tile_depth: int) -> int:
    """Return a power of two near `wanted` whose pieces are at least two tiles deep."""
    deepest = max(1, depth // (2 * tile_depth))
    return min(power_of_two(round(wanted)), power_of_two(deepest // 2 + 1))
