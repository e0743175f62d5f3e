"""Noise for drawing tokens: a pure function of (seed, sample index, position, token id).

The bits come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011, sections 3.3 and 4): a keyed bijection of 128-bit counters, so two draws never
share bits unless all four arguments agree. One call gives four words, for four neighbouring tokens:

    key     = seed                                         2 words
    counter = (token id // 4, position, sample index, 0)   4 words
    bits    = Philox(key, counter)[token id % 4]           1 word

With v = (bits + 1/2) / 2**32, strictly between 0 and 1, E = -log(1 - v) is exponential and
g = -log(E) is Gumbel noise: finite always, from -3.14 to 22.9. Small v is where winners come from
and is resolved to 2**-33, so a token's probability is exact to about that. A decision about a whole
row has the counter (0, position, sample index, 1), which no token has.

Words are int64 tensors here, since torch does not multiply unsigned ones; of a product that wraps
around, both halves are still those of the unsigned product.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["four_words", "gumbel", "row_uniform", "token_bits"]

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
"""Rounds, with a margin for safety: 7 already pass every test of the paper (its table 2)."""

_MASK = 0xFFFFFFFF


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, from random words of any shape; finite for every word."""
    v = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def token_bits(
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """The random words of tokens: int64 tensors of shapes that broadcast to that of the result."""
    words = four_words(seeds, sample_indices, positions, token_ids >> 2)
    return words.gather(-1, (token_ids & 3).expand(words.shape[:-1])[..., None]).squeeze(-1)


def four_words(
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
    quads: torch.Tensor,
) -> torch.Tensor:
    """The random words of tokens 4 · quad … 4 · quad + 3, along a new last dimension."""
    words = _philox(seeds, quads, positions, sample_indices, torch.zeros_like(sample_indices))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def row_uniform(seed: int, sample_index: int, position: int) -> float:
    """A number strictly between 0 and 1 for the row that draws at a position."""
    return (_philox(seed, 0, position, sample_index, 1)[0] + 0.5) * 2.0**-32


def _philox(key: Any, *counter: Any) -> tuple[Any, Any, Any, Any]:
    """Four words from a key of 64 bits and a counter of four words: integers, or int64 tensors."""
    c0, c1, c2, c3 = (word & _MASK for word in counter)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK
        c2, c3 = ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3
