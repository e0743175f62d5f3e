"""`token_logprobs` in Triton: sums over pieces of rows, and the most likely by the buckets and
ranks of `draw`, without a sort of the vocabulary."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.base.errors import EngineError
from quire.ops.sampling.draw.triton_filter import collect_kernel, fill_kernel, rank_kernel
from quire.ops.sampling.draw.triton_row import BUCKETS, check_vocabulary, logit_of_rank, rank_of

__all__ = ["token_logprobs"]

_BLOCK, _WARPS, _TILES = 4096, 8, 4
_MOST = 1024
_INFINITY = tl.constexpr(float("inf"))
_NO_RANK = tl.constexpr(2**62)


@triton.jit
def _sum_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    token_ids_ptr,
    largest_ptr,
    total_ptr,
    better_ptr,
    BLOCK: tl.constexpr,
):
    """Grid: (tokens, pieces of BLOCK). Writes the largest logit of a piece, infinite if one is no
    number; the sum of exp(logit - largest); the number of logits ranked before the token."""
    index = tl.program_id(0).to(tl.int64)
    out = index * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    row_ptr = logits_ptr + tl.load(rows_ptr + index) * stride
    logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
    broken = tl.max(((logit != logit) | (logit == _INFINITY)).to(tl.int32), axis=0) > 0
    largest = tl.max(logit, axis=0)
    weight = tl.where(logit > -_INFINITY, tl.exp(logit - largest), 0.0)
    chosen = tl.maximum(tl.load(token_ids_ptr + index), 0)
    rank = rank_of(tl.load(row_ptr + chosen).to(tl.float32), chosen)
    better = inside & (rank_of(logit, token) < rank)
    tl.store(largest_ptr + out, tl.where(broken, _INFINITY, largest))
    tl.store(total_ptr + out, tl.sum(weight, axis=0))
    tl.store(better_ptr + out, tl.sum(better.to(tl.int32), axis=0))


@triton.jit
def _gather_kernel(
    logits_ptr,
    stride,
    vocab_size,
    rows_ptr,
    last_ptr,
    counter_ptr,
    gathered_ptr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (tokens, chunks of TILES blocks). Collects the ranks of all down to the last, in any
    order."""
    index = tl.program_id(0).to(tl.int64)
    last = tl.load(last_ptr + index)
    row_ptr = logits_ptr + tl.load(rows_ptr + index) * stride
    for tile in range(TILES):
        token = (tl.program_id(1) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        logit = tl.load(row_ptr + token, mask=inside, other=-_INFINITY).to(tl.float32)
        rank = rank_of(logit, token)
        inside &= (rank <= last) & (logit > -_INFINITY)
        found = tl.sum(inside.to(tl.int32), axis=0)
        if found > 0:
            start = tl.atomic_add(counter_ptr + index, found, sem="relaxed")
            at = start + tl.cumsum(inside.to(tl.int32), axis=0) - 1
            tl.store(gathered_ptr + index * K + at, rank, mask=inside & (at < K))


@triton.jit(do_not_specialize=["k"])
def _finish_kernel(
    logits_ptr,
    stride,
    rows_ptr,
    token_ids_ptr,
    largest_ptr,
    total_ptr,
    better_ptr,
    pieces,
    counter_ptr,
    gathered_ptr,
    k,
    logprobs_ptr,
    ranks_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    ID_MASK: tl.constexpr,
    K: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid: (tokens,). K: a power of two, at least k."""
    index = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    at, inside = index * pieces + piece, piece < pieces
    of_pieces = tl.load(largest_ptr + at, mask=inside, other=-_INFINITY)
    largest = tl.max(of_pieces, axis=0)
    below = tl.where(of_pieces > -_INFINITY, of_pieces - largest, -_INFINITY)
    total = tl.sum(tl.load(total_ptr + at, mask=inside, other=0.0) * tl.exp(below), axis=0)
    log_total = tl.log(total)
    chosen = tl.maximum(tl.load(token_ids_ptr + index), 0)
    logit = tl.load(logits_ptr + tl.load(rows_ptr + index) * stride + chosen).to(tl.float32)
    tl.store(logprobs_ptr + index, logit - largest - log_total)
    better = tl.sum(tl.load(better_ptr + at, mask=inside, other=0), axis=0)
    tl.store(ranks_ptr + index, 1 + better)
    if k > 0:
        place = tl.arange(0, K)
        found = place < tl.load(counter_ptr + index)
        ranks = tl.sort(tl.load(gathered_ptr + index * K + place, mask=found, other=_NO_RANK))
        ids = tl.where(found, (ranks & ID_MASK).to(tl.int32), -1)
        listed = tl.where(found, logit_of_rank(ranks) - largest - log_total, -_INFINITY)
        tl.store(top_ids_ptr + index * k + place, ids, mask=place < k)
        tl.store(top_logprobs_ptr + index * k + place, listed, mask=place < k)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contract in `ops.sampling.token_logprobs`. Raises EngineError for more than 2**20 tokens."""
    if not 0 <= k <= _MOST:
        raise EngineError(f"token_logprobs lists 0 to {_MOST} tokens, not {k}.")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, vocab_size = len(rows), logits.shape[1]
    mask = check_vocabulary(vocab_size)
    logprobs = logits.new_empty(count, dtype=torch.float32)
    ranks = logits.new_empty(count, dtype=torch.int32)
    top_ids = logits.new_empty((count, k), dtype=torch.int32)
    top_logprobs = logits.new_empty((count, k), dtype=torch.float32)
    if count == 0:
        return logprobs, ranks, top_ids, top_logprobs
    pieces = triton.cdiv(vocab_size, _BLOCK)
    largest = logits.new_empty((count, pieces), dtype=torch.float32)
    total = torch.empty_like(largest)
    better = torch.empty_like(largest, dtype=torch.int32)
    row = (logits, logits.stride(0), vocab_size, rows)
    _sum_kernel[(count, pieces)](
        *row, token_ids, largest, total, better, BLOCK=_BLOCK, num_warps=_WARPS
    )
    size = triton.next_power_of_2(max(k, 2))
    counter = torch.zeros_like(rows, dtype=torch.int32)
    gathered = logits.new_empty((count, size), dtype=torch.int64)
    if k > 0:
        last = _last_ranks(row, k, largest)
        _gather_kernel[(count, triton.cdiv(pieces, _TILES))](
            *row, last, counter, gathered, K=size, TILES=_TILES, BLOCK=_BLOCK, num_warps=_WARPS
        )
    _finish_kernel[(count,)](
        logits,
        logits.stride(0),
        rows,
        token_ids,
        largest,
        total,
        better,
        pieces,
        counter,
        gathered,
        k,
        logprobs,
        ranks,
        top_ids,
        top_logprobs,
        ID_MASK=mask,
        K=size,
        PIECES=triton.next_power_of_2(pieces),
    )
    return logprobs, ranks, top_ids, top_logprobs


def _last_ranks(
    row: tuple[torch.Tensor, int, int, torch.Tensor], k: int, largest: torch.Tensor
) -> torch.Tensor:
    """Return the k-th rank of each row, int64 [M], which top-k looks for at temperature 1."""
    logits, _, _, rows = row
    count, pieces = largest.shape
    one = logits.new_ones(count, dtype=torch.float64)
    top_k = torch.full_like(rows, k)
    buckets = logits.new_zeros((count, 2 * BUCKETS + 1), dtype=torch.int64)
    collected = logits.new_empty((count, _MOST), dtype=torch.int64)
    last = torch.empty_like(rows)
    arguments = (*row, rows, one, top_k, one, largest, pieces, buckets)
    width = {"HAS_SLOTS": False, "PIECES": triton.next_power_of_2(pieces)}
    blocks = {**width, "BLOCK": _BLOCK, "num_warps": _WARPS}
    grid = (count, triton.cdiv(pieces, _TILES))
    fill_kernel[grid](*arguments, TILES=_TILES, **blocks)
    collect_kernel[grid](*arguments, collected, COLLECTED=_MOST, EXACT=True, TILES=_TILES, **blocks)
    rank_kernel[(count,)](*arguments, collected, last, COLLECTED=_MOST, EXACT=True, **blocks)
    return last
