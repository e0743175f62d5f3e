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

__all__ = ["gumbel", "token_bits"]

WordArray = npt.NDArray[np.uint64]
BitArray = npt.NDArray[np.uint32]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
"""With a margin for safety; 7 already pass every test of the paper (its table 2)."""

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def gumbel(bits: BitArray) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise from random words, any shape; finite for every word."""
    v = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-v))


def token_bits(
    seeds: npt.ArrayLike,
    sample_indices: npt.ArrayLike,
    positions: npt.ArrayLike,
    token_ids: npt.ArrayLike,
) -> BitArray:
    """The random words of tokens; integers of shapes that broadcast to that of the result."""
    tokens = np.asarray(token_ids, np.int64)
    seed = np.asarray(seeds).astype(np.uint64)
    counter = [
        np.asarray(word).astype(np.uint64) & _MASK
        for word in (tokens >> 2, positions, sample_indices, 0)
    ]
    words = np.broadcast_arrays(*_philox(counter, [seed & _MASK, seed >> _HALF]), tokens)[:4]
    return np.choose(tokens & 3, words).astype(np.uint32)


def _philox(counter: list[WordArray], key: list[WordArray]) -> tuple[WordArray, ...]:
    """Philox4x32-10 of four counter words and two key words, 32 bits each in 64-bit lanes."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = (b >> _HALF) ^ c1 ^ k0, b & _MASK
        c2, c3 = (a >> _HALF) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3
