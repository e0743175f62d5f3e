"""Noise for drawing tokens: a pure function of (seed, sample index, position, token id).

The bits come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011, sections 3.3 and 4): a keyed bijection of 128-bit counters, so two draws never
share bits unless all four arguments agree. GPUs have it built in, which lets another provider make
the same bits. One call gives four words, for four neighbouring tokens:

    key     = seed                                         2 words
    counter = (token id // 4, position, sample index, 0)   4 words
    bits    = Philox(key, counter)[token id % 4]           1 word

With v = (bits + 1/2) / 2**32, strictly between 0 and 1, E = -log(1 - v) is exponential and
g = -log(E) is Gumbel noise: finite always, from -3.14 to 22.9. Small v is where winners come from
and is resolved to 2**-33, so a token's probability is exact to about that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["VocabularyNoise", "gumbel", "token_bits"]

WordArray = npt.NDArray[np.uint64]
BitArray = npt.NDArray[np.uint32]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
"""With a margin for safety; 7 already pass every test of the paper (its table 2)."""

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_BUFFERS = 6
_MAX_LANES = 16384
"""Six buffers of 128 KiB stay in the second-level cache, and a call's fixed cost is shared."""


def gumbel(bits: BitArray) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise from random words, any shape; finite for every word."""
    v = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-v))


def token_bits(
    seeds: WordArray,
    sample_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
) -> BitArray:
    """The random words of single tokens; all arguments and the result [number of tokens]."""
    lanes = np.empty((_BUFFERS, token_ids.size), np.uint64)
    lanes[0] = token_ids >> 2
    lanes[1] = positions
    lanes[2] = sample_indices
    lanes[3] = 0
    words = _philox(lanes, seeds & _MASK, seeds >> _HALF)
    return np.choose(token_ids & 3, words).astype(np.uint32)


class VocabularyNoise:
    """Random words for whole vocabularies, in buffers that are made once.

    vocab_size: V. rows_per_call: more draws than one are made at once where the vocabulary is
    small, because a call costs a fixed 0.1 ms.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        num_lanes = -(-vocab_size // 4)
        self.rows_per_call = max(1, _MAX_LANES // num_lanes)
        self._counters = np.arange(num_lanes, dtype=np.uint64)
        block = (_BUFFERS, self.rows_per_call, min(_MAX_LANES, num_lanes))
        self._lanes = np.empty(block, np.uint64)
        self._bits = np.empty((self.rows_per_call, num_lanes, 4), np.uint32)

    def bits(
        self,
        seeds: WordArray,
        sample_indices: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> BitArray:
        """The random words of all tokens for a few draws.

        seeds, sample_indices, positions: [R], R at most `rows_per_call`.
        Returns uint32 [R, V], valid until the next call.
        """
        num_rows = seeds.size
        key_0, key_1 = (seeds & _MASK)[:, None], (seeds >> _HALF)[:, None]
        for start in range(0, self._counters.size, _MAX_LANES):
            counters = self._counters[start : start + _MAX_LANES]
            block = slice(start, start + counters.size)
            lanes = self._lanes[:, :num_rows, : counters.size]
            lanes[0] = counters
            lanes[1] = positions[:, None]
            lanes[2] = sample_indices[:, None]
            lanes[3] = 0
            for column, word in enumerate(_philox(lanes, key_0, key_1)):
                self._bits[:num_rows, block, column] = word
        return self._bits.reshape(self.rows_per_call, -1)[:num_rows, : self._vocab_size]


def _philox(lanes: WordArray, key_0: WordArray, key_1: WordArray) -> tuple[WordArray, ...]:
    """Philox4x32-10 on 32-bit words that lie in 64-bit lanes.

    lanes: [6, ...]: the four counter words, and two of scratch. All are overwritten.
    key_0, key_1: broadcast to one word per lane. Returns the four words, views of `lanes`.
    """
    c0, c1, c2, c3, product_0, product_1 = lanes
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIER_0, out=product_0)
        np.multiply(c2, _MULTIPLIER_1, out=product_1)
        _mix(product_1, c1, key_0, out=c0)
        _mix(product_0, c3, key_1, out=c2)
        # The lower halves of the products are the new c1 and c3. Their upper halves are rubbish
        # that only ever meets an XOR, and the mask after it.
        c1, product_1 = product_1, c1
        c3, product_0 = product_0, c3
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    np.bitwise_and(c1, _MASK, out=c1)
    np.bitwise_and(c3, _MASK, out=c3)
    return c0, c1, c2, c3


def _mix(product: WordArray, word: WordArray, key: WordArray, out: WordArray) -> None:
    """out = (upper half of `product`) XOR `word` XOR `key`, the lower 32 bits."""
    np.right_shift(product, _HALF, out=out)
    np.bitwise_xor(out, word, out=out)
    np.bitwise_xor(out, key, out=out)
    np.bitwise_and(out, _MASK, out=out)
