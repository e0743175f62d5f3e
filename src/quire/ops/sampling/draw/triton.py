"""`draw` in Triton: whole rows without a sort, on grids that the shapes alone decide.

Six kernels, in float32 with integer masses, so that nothing depends on an order. `scan` reads all
rows and draws for those without a filter. For the others `fill` counts tokens and their mass in
buckets of z, `collect` gathers the tokens of the buckets where top-k and top-p end, `rank` sorts
those few and so finds the last token that may be drawn, and `choose` draws among what is left.
`finish` compares the pieces. Rows with nothing to filter, or greedy, leave the middle ones at once.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton

from quire.ops.sampling.draw.masks import with_masks
from quire.ops.sampling.draw.triton_filter import (
    choose_kernel,
    collect_kernel,
    fill_kernel,
    rank_kernel,
)
from quire.ops.sampling.draw.triton_row import BUCKETS, check_vocabulary
from quire.ops.sampling.draw.triton_scan import finish_kernel, scan_kernel

__all__ = ["draw"]

_BLOCK, _WARPS = 4096, 8
_TILES = 4
"""Blocks that a program of the filters reads in turn: fewer programs leave fewer to end at once."""

_COLLECTED = 1024
"""Tokens of a row that are sorted at once. Where a bucket has more, ranks are searched."""


def _draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contract in `ops.sampling.draw`; scores and masses are float32, within 1e-5 of the formula.
    Raises EngineError for more than 2**20 tokens."""
    count, vocab_size = len(rows), logits.shape[1]
    check_vocabulary(vocab_size)
    token_ids = torch.empty(count, dtype=torch.int32, device=logits.device)
    if count == 0:
        return token_ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    pieces, chunks = triton.cdiv(vocab_size, _BLOCK), triton.cdiv(vocab_size, _BLOCK * _TILES)
    # separate tensors, so that all addresses are multiples of 16 whatever the count: otherwise
    # Triton compiles another kernel
    largest, score = (logits.new_empty((count, pieces), dtype=torch.float32) for _ in range(2))
    greedy, token = (logits.new_empty((count, pieces), dtype=torch.int32) for _ in range(2))
    chosen_score = logits.new_empty((count, chunks), dtype=torch.float32)
    chosen_token = logits.new_empty((count, chunks), dtype=torch.int32)
    # per row: masses and counts of buckets, number of collected tokens
    buckets = logits.new_zeros((count, 2 * BUCKETS + 1), dtype=torch.int64)
    collected = logits.new_empty((count, _COLLECTED), dtype=torch.int64)
    last = logits.new_empty(count, dtype=torch.int64)
    has_slots = slots is not None
    slots = rows if slots is None else slots
    row = (logits, logits.stride(0), vocab_size, rows, slots)
    filters = (temperature, top_k, top_p)
    stream = (seeds, sample_indices, positions)
    width = {"HAS_SLOTS": has_slots, "PIECES": triton.next_power_of_2(pieces)}
    blocks = {**width, "BLOCK": _BLOCK, "num_warps": _WARPS}
    tiles = {**blocks, "TILES": _TILES}
    scan_kernel[(count, pieces)](
        *row,
        *filters,
        min_p,
        *stream,
        largest,
        greedy,
        score,
        token,
        HAS_SLOTS=has_slots,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    found = (largest, pieces, buckets)
    collecting = {"COLLECTED": _COLLECTED, "EXACT": False}
    fill_kernel[(count, chunks)](*row, *filters, *found, **tiles)
    collect_kernel[(count, chunks)](*row, *filters, *found, collected, **collecting, **tiles)
    rank_kernel[(count,)](*row, *filters, *found, collected, last, **collecting, **blocks)
    choose_kernel[(count, chunks)](
        *row,
        *filters,
        min_p,
        *stream,
        largest,
        pieces,
        last,
        chosen_score,
        chosen_token,
        **tiles,
    )
    finish_kernel[(count,)](
        vocab_size,
        slots,
        *filters,
        min_p,
        largest,
        greedy,
        score,
        token,
        chosen_score,
        chosen_token,
        pieces,
        chunks,
        token_ids,
        num_warps=1,
        **width,
    )
    return token_ids


draw = with_masks(_draw)
