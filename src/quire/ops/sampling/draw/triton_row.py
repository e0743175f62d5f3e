"""Shared parts of the drawing kernels: a row's parameters, noise, ranks, and buckets of z."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from quire.base.errors import EngineError

__all__ = [
    "BUCKETS",
    "check_vocabulary",
    "depth_of",
    "fixed_weight",
    "gumbel_of_tokens",
    "logit_of_rank",
    "rank_of",
    "row_largest",
    "scale_of",
]

BUCKETS = 256
"""Number of buckets of z, best first: 8 to a unit; the last one has all that is more than 31 below
the largest. Noise lies between -3.2 and 22.9, so no token of the last one wins against the
largest."""

_PER_UNIT = tl.constexpr(8.0)
_LAST = tl.constexpr(BUCKETS - 1)
_FIXED = tl.constexpr(2.0**42)
"""Masses are sums of exp(z) in units of 2**-42, exact in any order; 2**20 tokens fit in 63 bits."""

_ID_BITS = tl.constexpr(20)
"""Bits of a token id in a rank."""

_MOST_TOKENS = 1 << 20
_INFINITY = tl.constexpr(float("inf"))


def check_vocabulary(vocab_size: int) -> int:
    """Return the mask of a rank's bits that are the token id. Raises EngineError for more than
    2**20 tokens."""
    if vocab_size > _MOST_TOKENS:
        raise EngineError(
            f"sampling in Triton takes up to {_MOST_TOKENS} tokens, not {vocab_size}: force the "
            'provider "reference" of draw and token_logprobs.'
        )
    return _MOST_TOKENS - 1


@triton.jit
def scale_of(temperature):
    """Return 1 / temperature, float32, finite."""
    return tl.minimum(1.0 / temperature, 1e30).to(tl.float32)


@triton.jit
def gumbel_of_tokens(seed, sample_index, position, first, BLOCK: tl.constexpr):
    """Return the noise of the tokens first … first + BLOCK - 1, float32; first is a multiple of 4.

    Follows noise.py; -log(1 - v) is summed as a series where 1 - v would lose digits of v. The
    result, at most 23, is within 4e-6 of the noise in float64.
    """
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = quads * 0
    position_word = zeros + position.to(tl.uint32)
    sample_word = zeros + sample_index.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quads, position_word, sample_word, zeros)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    tail = v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))
    exponential = tl.where(v < 0.0625, v * (1.0 + v * (0.5 + tail)), -tl.log(u))
    return -tl.log(exponential)


@triton.jit
def row_largest(largest_ptr, draw, pieces, PIECES: tl.constexpr):
    """Return the largest logit of a row from those of its pieces; infinite for a broken row."""
    piece = tl.arange(0, PIECES)
    of_pieces = tl.load(largest_ptr + draw * pieces + piece, mask=piece < pieces, other=-_INFINITY)
    return tl.max(of_pieces, axis=0)


@triton.jit
def rank_of(logit, token):
    """Return an int64 that sorts like a token's rank: smaller for a larger logit, then a smaller
    id. A float32 read as an integer sorts like the number once the lower 31 bits of negative ones
    are flipped; adding 0 turns -0.0 into 0.0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((ascending ^ -1).to(tl.int64) << _ID_BITS) | token.to(tl.int64)


@triton.jit
def logit_of_rank(rank):
    """Return the logit that `rank_of` received."""
    ascending = (rank >> _ID_BITS).to(tl.int32) ^ -1
    bits = ascending ^ ((ascending >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def depth_of(logit, largest, scale):
    """Return the bucket of a logit; the last one for -inf."""
    z = (logit - largest) * scale
    return tl.minimum(-z * _PER_UNIT, _LAST * 1.0).to(tl.int32)


@triton.jit
def fixed_weight(logit, largest, scale):
    """Return exp(z) as an int64 in units of 2**-42."""
    return (tl.exp((logit - largest) * scale) * _FIXED).to(tl.int64)
