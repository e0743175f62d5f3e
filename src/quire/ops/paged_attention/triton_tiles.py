"""What the kernels for prompts and for single queries share: tokens out of pages, one tile of keys
into a running softmax (Dao et al. 2022, arXiv:2205.14135, algorithm 1), in powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2_E", "add_tile", "load_tile", "row_of_item", "token_offsets"]


LOG2_E = 1.4426950408889634
"""By which scores are scaled for powers of two."""


@triton.jit
def row_of_item(counts, item):
    """Work items are numbered through all rows, of which row r has counts[r]: the row of `item`."""
    return tl.sum((tl.cumsum(counts, axis=0) <= item).to(tl.int32))


@triton.jit
def token_offsets(
    table_ptr, position, exists, block_stride, token_stride, BLOCK_SIZE: tl.constexpr
):
    """Where the tokens at `position` of one row begin in the pool, in elements."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    return block * block_stride + (position % BLOCK_SIZE) * token_stride


@triton.jit
def load_tile(cache_ptr, offsets, exists, dim, head_dim, PADDED: tl.constexpr):
    """[tokens, dims]. Nothing is read of tokens that do not exist: there may be NaN."""
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
    acc,
    largest,
    total,
    scale,
    QUANTIZED: tl.constexpr,
    MASKED: tl.constexpr,
    HIDES: tl.constexpr,
):
    """acc [queries, dims], largest and total [queries] after the keys of one tile.

    visible: [queries, keys], only if MASKED. scale: log2(e) included. HIDES: some query may see
    less of the tile than another one, so that a V that is not finite must not reach it as 0 · inf.
    """
    scores = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee") * scale
    if QUANTIZED:
        scores *= k_scale[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A query that has seen nothing yet: -inf minus -inf is NaN.
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
