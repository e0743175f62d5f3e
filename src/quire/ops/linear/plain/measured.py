"""`linear` on a GPU by the faster of two measured products: the vendor's or, for few rows, ours in
Triton with one of several cuts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.ops.linear.plain.choice_cache import ChoiceCache, Choices
from quire.ops.linear.plain.tiles import MAX_FEW_ROWS, Tiles, candidates
from quire.ops.linear.plain.vendor import VendorMatrix

__all__ = ["MeasuredMatrix", "ProductChooser"]

_log = logging.getLogger("quire.ops.linear.plain")

Multiply = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype, Tiles], torch.Tensor
]
"""x [T, I], weight [O, I], bias [O] or None, dtype of the result, tiles → [T, O]."""

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Times calls: the seconds that they take, one after the other."""

SMALLEST_BYTES = 2**20
"""Smallest matrix that is worth a measurement; a smaller one is read faster than a kernel is
launched."""

BEYOND_CACHE = 2**27
"""Bytes of copies of the weight that take turns, so that none is read from the L2 cache (50 MiB on
an H200), as in a step over a whole model."""

MARGIN = 0.97
"""Our product is chosen below this share of the vendor's time; smaller differences are noise."""


class ProductChooser:
    """Measures each shape of matrix once, for 1, 2, 4, … `MAX_FEW_ROWS` rows.

    time: times calls on the GPU. processors: number of the GPU's multiprocessors.
    """

    def __init__(
        self, time: Timer, multiply: Multiply, cache: ChoiceCache, processors: int
    ) -> None:
        self._time = time
        self._multiply = multiply
        self._cache = cache
        self._processors = processors

    def choose(self, matrix: VendorMatrix) -> Choices:
        """Choose products by number of rows. All are None for matrices too small to measure, and
        for float32, whose products tensor cores do not compute."""
        weight = matrix.weight
        if weight.nbytes < SMALLEST_BYTES or weight.dtype == torch.float32:
            return dict.fromkeys(_numbers_of_rows())
        outputs, depth = weight.shape
        biased = "" if matrix.bias is None else " with bias"
        name = f"{outputs} x {depth} {str(weight.dtype).removeprefix('torch.')}{biased}"
        known = self._cache.get(name)
        if known is not None and list(known) == list(_numbers_of_rows()):
            return known
        started = time.monotonic()
        choices = self._measure(matrix)
        ours = [str(rows) for rows, tiles in choices.items() if tiles is not None]
        _log.info(
            "Products of %s: ours in Triton for %s rows, the vendor's for others (measured in "
            "%.1f s).",
            name,
            ", ".join(ours) or "no",
            time.monotonic() - started,
        )
        self._cache.put(name, choices)
        return choices

    def multiply(
        self, matrix: VendorMatrix, x: torch.Tensor, out_dtype: torch.dtype, tiles: Tiles
    ) -> torch.Tensor:
        """x [T, I] in the dtype of the matrix → [T, O], by Triton."""
        return self._multiply(x, matrix.weight, matrix.bias, out_dtype, tiles)

    def _measure(self, matrix: VendorMatrix) -> Choices:
        weight = matrix.weight
        more = range(BEYOND_CACHE // weight.nbytes)
        copies = [matrix, *(VendorMatrix(weight.clone(), matrix.bias) for _ in more)]
        return {rows: self._fastest(copies, rows) for rows in _numbers_of_rows()}

    def _fastest(self, copies: Sequence[VendorMatrix], num_rows: int) -> Tiles | None:
        weight = copies[0].weight
        outputs, depth = weight.shape
        x = torch.randn(num_rows, depth, device=weight.device).to(weight.dtype)
        best, best_seconds = None, MARGIN * self._time([partial(copy, x) for copy in copies])
        for tiles in candidates(num_rows, outputs, depth, self._processors):
            calls = [partial(self.multiply, copy, x, x.dtype, tiles) for copy in copies]
            try:
                seconds = self._time(calls)
            except Exception as error:  # noqa: BLE001  a GPU that lacks what the tiles need
                _log.info("%s do not run here: %s", tiles, error)
                continue
            if seconds < best_seconds:
                best, best_seconds = tiles, seconds
        return best


class MeasuredMatrix:
    """A `PackedMatrix` that multiplies by the products chosen when it was packed."""

    def __init__(self, vendor: VendorMatrix, chooser: ProductChooser) -> None:
        self._vendor = vendor
        self._chooser = chooser
        self._choices = chooser.choose(vendor)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        num_rows = x.numel() // x.shape[-1]
        tiles = None
        if 0 < num_rows <= MAX_FEW_ROWS and x.dtype == self._vendor.weight.dtype:
            tiles = self._choices[1 << (num_rows - 1).bit_length()]
        if tiles is None:
            return self._vendor(x, out_dtype)
        y = self._chooser.multiply(
            self._vendor, x.reshape(num_rows, -1), out_dtype or x.dtype, tiles
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vendor.rows(ids)


def _numbers_of_rows() -> Sequence[int]:
    return [1 << power for power in range(MAX_FEW_ROWS.bit_length())]
