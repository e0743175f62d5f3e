"""The kernels between the first and the last one of a draw: they find where top-k and top-p end,
and draw among the tokens that these and min-p leave."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.sampling.draw.triton_row import (
    BUCKETS,
    depth_of,
    fixed_weight,
    gumbel_of_tokens,
    logit_of_rank,
    rank_of,
    row_largest,
    scale_of,
)

__all__ = ["choose_kernel", "collect_kernel", "fill_kernel", "rank_kernel"]

_BUCKETS = tl.constexpr(BUCKETS)
_LAST_BUCKET = tl.constexpr(BUCKETS - 1)
_PER_ROW = tl.constexpr(2 * BUCKETS + 1)
"""Words of a row in `buckets`: masses, counts, number of collected tokens."""

_INFINITY = tl.constexpr(float("inf"))
_NO_RANK = tl.constexpr(2**62)
"""Rank after those of all tokens."""


@triton.jit
def _cuts(largest, temperature, top_k, top_p, vocab_size):
    """Return True if top-k or top-p may exclude tokens that can otherwise be drawn."""
    ok = (largest < _INFINITY) & (largest > -_INFINITY) & (temperature > 0.0)
    return ok & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0))


@triton.jit
def fill_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    largest_ptr,
    pieces,
    buckets_ptr,
    HAS_SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (draws, chunks of TILES blocks). Adds up count and mass of each bucket."""
    draw = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    largest = row_largest(largest_ptr, draw, pieces, PIECES)
    if _cuts(largest, temperature, top_k, top_p, vocab_size):
        scale = scale_of(temperature)
        row_ptr = logits_ptr + tl.load(rows_ptr + draw) * stride
        mass_ptr = buckets_ptr + draw * _PER_ROW
        bucket = tl.arange(0, _BUCKETS)
        for tile in range(TILES):
            token = (tl.program_id(1) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
            inside = token < vocab_size
            logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
            inside &= logit > -_INFINITY
            depth = depth_of(logit, largest, scale)
            counts = tl.histogram(depth, _BUCKETS, mask=inside).to(tl.int64)
            count_ptr = mass_ptr + _BUCKETS + bucket
            tl.atomic_add(count_ptr, counts, mask=counts > 0, sem="relaxed")
            weight = tl.where(inside, fixed_weight(logit, largest, scale), 0)
            near = inside & (depth < _LAST_BUCKET)
            tl.atomic_add(mass_ptr + depth, weight, mask=near, sem="relaxed")
            rest = tl.sum(tl.where(near, 0, weight), axis=0)
            tl.atomic_add(mass_ptr + _LAST_BUCKET, rest, mask=rest > 0, sem="relaxed")


@triton.jit
def _span(buckets_ptr, draw, top_k, top_p, vocab_size, EXACT: tl.constexpr):
    """Find the buckets where top-k and top-p end. Return the first and the last; count and mass of
    all before the first, and the count within; whether top-k ends there, and the mass that it
    leaves if not. EXACT: also where it ends in the last bucket."""
    bucket = tl.arange(0, _BUCKETS)
    mass_ptr = buckets_ptr + draw * _PER_ROW
    mass = tl.load(mass_ptr + bucket)
    count = tl.load(mass_ptr + _BUCKETS + bucket)
    masses, counts = tl.cumsum(mass, axis=0), tl.cumsum(count, axis=0)
    most, least = tl.sum(mass, axis=0), tl.sum(mass, axis=0)
    end = _LAST_BUCKET
    if (top_k > 0) & (top_k < vocab_size):
        end = tl.sum((counts < top_k).to(tl.int32), axis=0)
        end = tl.minimum(end, _LAST_BUCKET)
        by_count = EXACT | (end < _LAST_BUCKET)
    else:
        by_count = tl.full([], False, tl.int1)
    if by_count:
        least = tl.sum(tl.where(bucket < end, mass, 0), axis=0)
        most = tl.sum(tl.where(bucket <= end, mass, 0), axis=0)
    first = end
    if top_p < 1.0:
        first = tl.sum((masses.to(tl.float64) < top_p * least.to(tl.float64)).to(tl.int32), axis=0)
        first = tl.minimum(first, end)
        if by_count == 0:
            end = first
    before = bucket < first
    within = (bucket >= first) & (bucket <= end)
    count_before = tl.sum(tl.where(before, count, 0), axis=0)
    mass_before = tl.sum(tl.where(before, mass, 0), axis=0)
    count_within = tl.sum(tl.where(within, count, 0), axis=0)
    return first, end, count_before, mass_before, count_within, by_count, most


@triton.jit
def collect_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    largest_ptr,
    pieces,
    buckets_ptr,
    collected_ptr,
    HAS_SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECTED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Grid: (draws, chunks). Collects the ranks of the tokens in the buckets of `_span`, in any
    order."""
    draw = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    largest = row_largest(largest_ptr, draw, pieces, PIECES)
    if _cuts(largest, temperature, top_k, top_p, vocab_size):
        first, end, _, _, count, _, _ = _span(buckets_ptr, draw, top_k, top_p, vocab_size, EXACT)
        if (first < _LAST_BUCKET) & (count <= COLLECTED):
            scale = scale_of(temperature)
            row_ptr = logits_ptr + tl.load(rows_ptr + draw) * stride
            counter_ptr = buckets_ptr + draw * _PER_ROW + 2 * _BUCKETS
            for tile in range(TILES):
                token = (tl.program_id(1) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
                inside = token < vocab_size
                logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
                depth = depth_of(logit, largest, scale)
                inside &= (depth >= first) & (depth <= end) & (logit > -_INFINITY)
                found = tl.sum(inside.to(tl.int32), axis=0)
                if found > 0:
                    start = tl.atomic_add(counter_ptr, found.to(tl.int64), sem="relaxed")
                    at = start + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                    out_ptr = collected_ptr + draw * COLLECTED + at
                    tl.store(out_ptr, rank_of(logit, token), mask=inside & (at < COLLECTED))


@triton.jit
def rank_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    largest_ptr,
    pieces,
    buckets_ptr,
    collected_ptr,
    last_ptr,
    HAS_SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECTED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Grid: (draws,). Finds the rank of the last token that top-k and top-p leave. The choice among
    the tokens of the last bucket changes no draw, so all of them are left, unless EXACT."""
    draw = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
    largest = row_largest(largest_ptr, draw, pieces, PIECES)
    last = tl.full([], _NO_RANK, tl.int64)
    if _cuts(largest, temperature, top_k, top_p, vocab_size):
        first, end, count_before, mass_before, count, by_count, mass = _span(
            buckets_ptr, draw, top_k, top_p, vocab_size, EXACT
        )
        scale = scale_of(temperature)
        if EXACT | (first < _LAST_BUCKET):
            if (first < _LAST_BUCKET) & (count <= COLLECTED):
                index = tl.arange(0, COLLECTED)
                ranks = tl.load(
                    collected_ptr + draw * COLLECTED + index, mask=index < count, other=_NO_RANK
                )
                ranks = tl.sort(ranks)
                kept = index < count
                if by_count:
                    kept &= index < top_k - count_before
                weight = tl.where(kept, fixed_weight(logit_of_rank(ranks), largest, scale), 0)
                if by_count:
                    mass = mass_before + tl.sum(weight, axis=0)
                if top_p < 1.0:
                    goal = top_p * mass.to(tl.float64)
                    before = mass_before + tl.cumsum(weight, axis=0) - weight
                    kept &= (before.to(tl.float64) < goal) | ((first == 0) & (index == 0))
                last = tl.max(tl.where(kept, ranks, -_NO_RANK), axis=0)
            else:
                row_ptr = logits_ptr + tl.load(rows_ptr + draw) * stride
                slack = tl.abs(largest) * 1e-6 + 1e-30
                above = largest - first.to(tl.float32) / (8.0 * scale)
                above = tl.minimum(above + slack + (largest - above) * 1e-5, largest)
                below = largest - (end + 1).to(tl.float32) / (8.0 * scale)
                below = below - slack - (largest - below) * 1e-5
                below = tl.where(end < _LAST_BUCKET, below, -_INFINITY)
                low = rank_of(above, tl.full([], 0, tl.int64))
                high = rank_of(below, tl.full([], vocab_size - 1, tl.int64))
                if by_count:
                    last = _search(
                        row_ptr, vocab_size, largest, scale, low, high, top_k, 0.0, True, BLOCK
                    )
                    mass = _amounts(row_ptr, vocab_size, largest, scale, last, BLOCK)[1]
                    high = last
                if top_p < 1.0:
                    goal = top_p * mass.to(tl.float64)
                    last = _search(
                        row_ptr, vocab_size, largest, scale, low, high, top_k, goal, False, BLOCK
                    )
    tl.store(last_ptr + draw, last)


@triton.jit
def _search(
    row_ptr, vocab_size, largest, scale, low, high, top_k, goal, BY_COUNT: tl.constexpr, BLOCK
):
    """Return the first rank in low … high down to which the goal is reached. Reads the row about 40
    times, so it is for the rare rows where too many tokens share a bucket: very flat laws, or very
    many equal logits."""
    while low < high:
        middle = (low + high) >> 1
        count, mass = _amounts(row_ptr, vocab_size, largest, scale, middle, BLOCK)
        if BY_COUNT:
            reached = count >= top_k
        else:
            reached = mass.to(tl.float64) >= goal
        low = tl.where(reached, low, middle + 1)
        high = tl.where(reached, middle, high)
    return low


@triton.jit
def _amounts(row_ptr, vocab_size, largest, scale, last, BLOCK: tl.constexpr):
    """Return count and mass of the tokens down to rank `last`."""
    counts = tl.zeros([BLOCK], tl.int64)
    masses = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
        inside &= (logit > -_INFINITY) & (rank_of(logit, token) <= last)
        counts += inside.to(tl.int64)
        masses += tl.where(inside, fixed_weight(logit, largest, scale), 0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def choose_kernel(
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
    pieces,
    last_ptr,
    score_ptr,
    token_ptr,
    HAS_SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (draws, chunks). Finds the best score of a chunk and its token, for rows with a
    filter."""
    draw = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + draw) if HAS_SLOTS else draw
    temperature = tl.load(temperature_ptr + slot)
    top_k, min_p = tl.load(top_k_ptr + slot), tl.load(min_p_ptr + slot)
    filtered = (top_k > 0) & (top_k < vocab_size)
    filtered |= (tl.load(top_p_ptr + slot) < 1.0) | (min_p > 0.0)
    if (temperature > 0.0) & filtered:
        largest = row_largest(largest_ptr, draw, pieces, PIECES)
        scale = scale_of(temperature)
        least = min_p.to(tl.float32)
        last = tl.load(last_ptr + draw)
        seed, sample_index = tl.load(seeds_ptr + slot), tl.load(samples_ptr + slot)
        position = tl.load(positions_ptr + draw)
        row_ptr = logits_ptr + tl.load(rows_ptr + draw) * stride
        best = tl.full([], -_INFINITY, tl.float32)
        winner = tl.full([], 0, tl.int32) + vocab_size
        for tile in range(TILES):
            start = (tl.program_id(1) * TILES + tile) * BLOCK
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
            z = (logit - largest) * scale
            inside &= (logit > -_INFINITY) & (rank_of(logit, token) <= last) & (tl.exp(z) >= least)
            if tl.max(inside.to(tl.int32), axis=0) > 0:
                noise = gumbel_of_tokens(seed, sample_index, position, start, BLOCK)
                score = tl.where(inside, z + noise, -_INFINITY)
                of_tile = tl.max(score, axis=0)
                if of_tile > best:
                    best = of_tile
                    winner = tl.min(tl.where(score == of_tile, token, vocab_size), axis=0)
        out = draw * tl.num_programs(1) + tl.program_id(1)
        tl.store(score_ptr + out, best)
        tl.store(token_ptr + out, winner)
