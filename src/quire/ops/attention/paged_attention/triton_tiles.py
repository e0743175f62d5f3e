"""Parts that the kernels for prompts and for single queries share: they read tokens from pages, and
add one tile of keys to a running softmax (Dao et al. 2022, arXiv:2205.14135, algorithm 1), in
powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.native.row_blocks import power_of_two

__all__ = [
    "LOG2_E",
    "add_sink",
    "add_tile",
    "divide",
    "load_tile",
    "row_lanes",
    "row_of_item",
    "score_factors",
    "token_offsets",
]

LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor that makes scores exponents of two."""

_FEWEST_LANES = 32


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return scale and soft_cap as the kernels take them: scores are exponents of two. With a cap
    the product of q and k is in units of half the cap, since tanh takes twice its argument."""
    if soft_cap is None:
        return scale * LOG2_E.value, 0.0
    return 2.0 * scale / soft_cap * LOG2_E.value, soft_cap * LOG2_E.value


def row_lanes(num_rows: int) -> int:
    """Return the number of rows that a program searches for its work. There are few such numbers:
    each compiles a kernel, which takes seconds while requests wait."""
    return max(_FEWEST_LANES, power_of_two(num_rows))


@triton.jit
def row_of_item(ends, item):
    """Return the row of `item`. Work items are numbered through all rows; those of row r end before
    ends[r]."""
    return tl.sum((ends <= item).to(tl.int32))


@triton.jit
def token_offsets(
    table_ptr, position, exists, block_stride, token_stride, BLOCK_SIZE: tl.constexpr
):
    """Return the offsets of the tokens at `position` of one row in the pool, in elements."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    return block * block_stride + (position % BLOCK_SIZE) * token_stride


@triton.jit
def load_tile(cache_ptr, offsets, exists, dim, head_dim, PADDED: tl.constexpr):
    """Load [tokens, dims]. Tokens that do not exist are not read, since there may be NaN."""
    mask = exists[:, None]
    if PADDED:
        mask = mask & (dim < head_dim)[None, :]
    return tl.load(cache_ptr + offsets[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def add_tile(
    q,
    k,
    v,
    k_scale,
    v_scale,
    visible,
    distance,
    slope,
    acc,
    largest,
    total,
    scale,
    soft_cap,
    QUANTIZED: tl.constexpr,
    MASKED: tl.constexpr,
    HIDES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Return acc [queries, dims], largest and total [queries] after the keys of one tile.

    visible: [queries, keys], only if MASKED. distance: position of the query minus that of the key,
    [queries or 1, keys], and slope: [queries], log2(e) included, only if ALIBI. scale, soft_cap:
    from `score_factors`. HIDES: some query may see less of the tile than another one, so a V that
    is not finite must not reach it as 0 · inf.
    """
    scores = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee") * scale
    if QUANTIZED:
        scores *= k_scale[None, :]
    if SOFT_CAP:  # tanh(x) = 1 - 2 / (1 + exp(2x)), right at both ends
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(scores))
    if ALIBI:
        scores -= slope[:, None] * distance.to(tl.float32)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # For a query that has seen nothing yet, -inf minus -inf would be NaN.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(largest - shift)
    total = total * shrink + tl.sum(weights, axis=1)
    acc *= shrink[:, None]
    if QUANTIZED:
        weights *= v_scale[None, :]
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
    elif HIDES:
        broken = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0.0, 1.0)
        if tl.max(tl.max(broken, axis=1), axis=0) > 0.0:
            v = tl.where(broken > 0.0, 0.0, v).to(v.dtype)
            seen = tl.dot(visible.to(tl.float16), broken.to(tl.float16))
            acc = tl.where(seen > 0.0, float("nan"), acc)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, new_largest, total


@triton.jit
def add_sink(sink, largest, total):
    """Return the factor by which acc shrinks, and total, after one more score without a value,
    log2(e) included."""
    new_largest = tl.maximum(largest, sink)
    shrink = tl.exp2(largest - new_largest)
    return shrink, total * shrink + tl.exp2(sink - new_largest)


@triton.jit
def divide(acc, total):
    """Return acc / total, zeros for queries that saw nothing; NaN stays NaN."""
    return tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
