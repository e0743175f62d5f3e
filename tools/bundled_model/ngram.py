"""Interpolated modified Kneser-Ney n-gram models over any symbols (bytes or tokens), in numpy.

The formulas are those of Chen & Goodman 1998, section 3 ("modified Kneser-Ney", interpolated):
three discounts per order from the counts of counts, continuation counts below the highest order,
and a uniform distribution below the unigrams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Sorted n-grams with counts, and per context the sum and the discounted mass."""

    keys: Symbols
    counts: Symbols
    contexts: Symbols
    totals: Symbols
    released: NDArray[np.float64]
    discounts: NDArray[np.float64]


class KneserNey:
    """An n-gram model; a symbol is below `vocabulary`, and `boundary` fills the start of a text.

    Raises ValueError when an n-gram of so many symbols does not fit into a key of 63 bits.
    """

    def __init__(
        self, texts: Sequence[Symbols], order: int, vocabulary: int, boundary: int
    ) -> None:
        self._order = order
        self._vocabulary = vocabulary
        self._boundary = boundary
        self._bits = max(vocabulary - 1, boundary).bit_length()
        if self._bits * order > 63:
            raise ValueError(f"{order} symbols of {self._bits} bits do not fit into a key")
        grams = np.concatenate([self._grams(text) for text in texts])
        self._orders: list[_Order] = []
        keys, counts = np.unique(grams, return_counts=True)
        for length in range(order, 0, -1):
            self._orders.append(self._table(keys, counts))
            # A shorter n-gram counts once for each different symbol that stands before it.
            mask = (1 << (self._bits * (length - 1))) - 1
            keys, counts = np.unique(keys & mask, return_counts=True)

    def _grams(self, text: Symbols) -> Symbols:
        """One key per symbol of the text: it and the symbols before it."""
        padded = np.concatenate([np.full(self._order - 1, self._boundary), text]).astype(np.int64)
        keys = np.zeros(len(text), dtype=np.int64)
        for offset in range(self._order):
            keys = (keys << self._bits) | padded[offset : offset + len(text)]
        return keys

    def _table(self, keys: Symbols, counts: Symbols) -> _Order:
        ones, twos, threes, fours = (max(1, int((counts == n).sum())) for n in (1, 2, 3, 4))
        y = ones / (ones + 2 * twos)
        values = (
            0.0,
            1 - 2 * y * twos / ones,
            2 - 3 * y * threes / twos,
            3 - 4 * y * fours / threes,
        )
        discounts = np.array(values)
        contexts, first = np.unique(keys >> self._bits, return_index=True)
        totals = np.add.reduceat(counts, first)
        released = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
        return _Order(keys, counts, contexts, totals, released, discounts)

    def bits(self, text: Symbols) -> float:
        """Bits that the model needs for the whole text."""
        grams = self._grams(text)
        probability = np.full(len(text), 1.0 / self._vocabulary)
        for length, table in zip(range(1, self._order + 1), reversed(self._orders), strict=True):
            keys = grams & ((1 << (self._bits * length)) - 1)
            counts = _lookup(table.keys, table.counts, keys)
            totals = _lookup(table.contexts, table.totals, keys >> self._bits)
            released = _lookup(table.contexts, table.released, keys >> self._bits)
            known = totals > 0
            kept = np.maximum(counts - table.discounts[np.minimum(counts, 3)], 0.0)
            mixed = (kept + released * probability) / np.maximum(totals, 1)
            probability = np.where(known, mixed, probability)
        return float(-np.log2(probability).sum())


def _lookup(keys: Symbols, values: NDArray[Any], wanted: Symbols) -> NDArray[Any]:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], values.dtype.type(0))


def byte_symbols(text: str) -> Symbols:
    """The UTF-8 bytes of a text."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
