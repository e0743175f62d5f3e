"""The first and the last kernel of a draw: whole rows in pieces, and the pieces put together.

The first one reads a row once. It finds the largest logit, which is all that greedy rows need, and
draws for rows without filters: z is relative to the largest of the piece, so no row has to be read
before. The last one compares pieces.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.sampling.draw.triton_row import gumbel_of_tokens, scale_of

__all__ = ["finish_kernel", "scan_kernel"]

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def scan_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    samples_ptr,
    positions_ptr,
    largest_ptr,
    greedy_ptr,
    score_ptr,
    token_ptr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (draws, pieces of BLOCK tokens). Writes [draws, pieces]: the largest logit, infinite if
    one is no number, and its token; the best score and its token where nothing is filtered."""
    draw = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    out = draw * tl.num_programs(1) + piece
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    first = piece * BLOCK
    token = first + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + tl.load(rows_ptr + draw) * stride
    logit = tl.load(row_ptr + token, mask=token < vocab_size, other=-_INFINITY).to(tl.float32)
    broken = tl.max(((logit != logit) | (logit == _INFINITY)).to(tl.int32), axis=0) > 0
    largest = tl.max(logit, axis=0)
    greedy = tl.min(tl.where(logit == largest, token, vocab_size), axis=0)
    tl.store(largest_ptr + out, tl.where(broken, _INFINITY, largest))
    tl.store(greedy_ptr + out, greedy)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    filtered = (top_k > 0) & (top_k < vocab_size)
    filtered |= (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    if (temperature > 0.0) & (filtered == 0):
        noise = gumbel_of_tokens(
            tl.load(seeds_ptr + slot),
            tl.load(samples_ptr + slot),
            tl.load(positions_ptr + draw),
            first,
            BLOCK,
        )
        z = (logit - largest) * scale_of(temperature)
        score = tl.where(logit > -_INFINITY, z + noise, -_INFINITY)
        best = tl.max(score, axis=0)
        tl.store(score_ptr + out, best)
        tl.store(token_ptr + out, tl.min(tl.where(score == best, token, vocab_size), axis=0))


@triton.jit
def finish_kernel(
    vocab_size,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    greedy_ptr,
    score_ptr,
    token_ptr,
    filtered_score_ptr,
    filtered_token_ptr,
    pieces,
    filtered_pieces,
    token_ids_ptr,
    HAS_SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid: (draws,). Of equal scores the smaller id wins."""
    draw = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    filtered = (top_k > 0) & (top_k < vocab_size)
    filtered |= (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    piece = tl.arange(0, PIECES)
    at = draw * pieces + piece
    inside = piece < pieces
    of_pieces = tl.load(largest_ptr + at, mask=inside, other=-_INFINITY)
    largest = tl.max(of_pieces, axis=0)
    if temperature > 0.0:
        if filtered:
            inside = piece < filtered_pieces
            at = draw * filtered_pieces + piece
            score = tl.load(filtered_score_ptr + at, mask=inside, other=-_INFINITY)
            token = tl.load(filtered_token_ptr + at, mask=inside, other=vocab_size)
        else:
            score = tl.load(score_ptr + at, mask=inside, other=-_INFINITY)
            token = tl.load(token_ptr + at, mask=inside, other=vocab_size)
            # -inf of a piece without any token: its score is -inf already
            below = tl.where(of_pieces > -_INFINITY, of_pieces - largest, 0.0)
            score += below * scale_of(temperature)
    else:
        score = of_pieces
        token = tl.load(greedy_ptr + at, mask=inside, other=vocab_size)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, vocab_size), axis=0)
    ok = (largest < _INFINITY) & (largest > -_INFINITY)
    tl.store(token_ids_ptr + draw, tl.where(ok, winner, -1))
