"""The draw: argmax over tokens of z + Gumbel noise, which follows the law exp(z) / sum exp(z).

(Gumbel, "Statistical Theory of Extreme Values", 1954; the trick in Maddison et al., "A* Sampling",
NeurIPS 2014, section 2.) Scores are compared in float64; the smaller position in the candidate
list wins a tie.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.sampling.candidates import Candidates
from quire.sampling.noise import VocabularyNoise, gumbel, token_bits
from quire.sampling.ranking import IdArray, LogitArray

__all__ = ["Drawer", "Streams"]

FloatArray = npt.NDArray[np.float64]

_MAX_GROUP = 2**16
"""Candidates whose noise is computed in one go: enough to hide the cost of a call."""

_SLACK = np.float32(1e-3)
"""Far above the float32 rounding of a bound, so that no possible winner is dropped by it."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Where each draw's noise comes from: seeds uint64, sample_indices, positions int64, all [R].

    positions: absolute position of the token that is drawn.
    """

    seeds: npt.NDArray[np.uint64]
    sample_indices: IdArray
    positions: IdArray

    def take(self, which: IdArray | slice) -> Streams:
        return Streams(self.seeds[which], self.sample_indices[which], self.positions[which])

    def repeat(self, times: Sequence[int]) -> Streams:
        """Row i as often as `times[i]` says."""
        seeds, indices = np.repeat(self.seeds, times), np.repeat(self.sample_indices, times)
        return Streams(seeds, indices, np.repeat(self.positions, times))


class Drawer:
    """Draws tokens for rows of one vocabulary; keeps its buffers between steps.

    vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._noise = VocabularyNoise(vocab_size)
        self._bounds = np.empty((self._noise.rows_per_call, vocab_size), np.float32)
        self._divisors = np.empty_like(self._bounds)

    def from_candidates(self, rows: Sequence[Candidates], streams: Streams) -> IdArray:
        """One token per row, int64 [R], from the candidates that each row has left."""
        drawn = np.empty(len(rows), np.int64)
        for group in _groups([row.z.size for row in rows]):
            chosen = rows[group]
            sizes = [row.z.size for row in chosen]
            token_ids = np.concatenate([row.token_ids for row in chosen])
            lanes = streams.take(group).repeat(sizes)
            bits = token_bits(lanes.seeds, lanes.sample_indices, lanes.positions, token_ids)
            scores = np.concatenate([row.z for row in chosen]) + gumbel(bits)
            drawn[group] = _winners(scores, token_ids, np.cumsum([0, *sizes]))
        return drawn

    def from_vocabulary(
        self,
        rows: Sequence[LogitArray],
        best: FloatArray,
        temperatures: FloatArray,
        streams: Streams,
    ) -> IdArray:
        """One token per row, int64 [R], any token with a logit above -inf.

        rows: R logits [V]. best: the largest of each, finite. temperatures: > 0.
        """
        drawn = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), self._noise.rows_per_call):
            part = slice(start, start + self._noise.rows_per_call)
            drawn[part] = self._draw_part(
                rows[part], best[part], temperatures[part], streams.take(part)
            )
        return drawn

    def _draw_part(
        self,
        rows: Sequence[LogitArray],
        best: FloatArray,
        temperatures: FloatArray,
        streams: Streams,
    ) -> IdArray:
        """Exact scores only for tokens that can win.

        With E = -log(1 - v), the winner has the largest exp(z) / E. As E >= v, exp(z) / v bounds
        that from above without a logarithm, and closely where it matters (small v). What lies
        below the exact value of the token with the largest bound cannot win: few tokens are left.
        """
        num_rows = len(rows)
        bits = self._noise.bits(streams.seeds, streams.sample_indices, streams.positions)
        bounds, divisors = self._bounds[:num_rows], self._divisors[:num_rows]
        for row, largest, bound in zip(rows, best, bounds, strict=True):
            np.subtract(row, np.float32(largest), out=bound)
        np.multiply(bounds, (1.0 / temperatures).astype(np.float32)[:, None], out=bounds)
        np.exp(bounds, out=bounds)
        np.add(bits, np.float32(0.5), out=divisors, dtype=np.float32)
        np.divide(bounds, divisors, out=bounds)

        leaders = bounds.argmax(axis=1)
        each = np.arange(num_rows)
        v = (bits[each, leaders].astype(np.float64) + 0.5) * 2.0**-32
        exact = bounds[each, leaders] * (v / -np.log1p(-v)).astype(np.float32)
        row_index, token_ids = np.nonzero(bounds >= (exact * (1 - _SLACK))[:, None])

        survivors = zip(row_index.tolist(), token_ids.tolist(), strict=True)
        logits = np.array([rows[row][token] for row, token in survivors], np.float64)
        z = (logits - best[row_index]) / temperatures[row_index]
        scores = z + gumbel(bits[row_index, token_ids])
        return _winners(scores, token_ids, np.searchsorted(row_index, np.arange(num_rows + 1)))


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of rows whose sizes add up to at most `_MAX_GROUP`, or of one larger row."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _MAX_GROUP:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _winners(scores: FloatArray, token_ids: IdArray, bounds: IdArray) -> IdArray:
    """Per segment bounds[i] … bounds[i + 1] - 1, the token id with the largest score."""
    return np.array(
        [
            token_ids[start + int(scores[start:stop].argmax())]
            for start, stop in itertools.pairwise(bounds.tolist())
        ],
        np.int64,
    )
