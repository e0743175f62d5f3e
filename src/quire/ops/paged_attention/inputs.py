"""Batches that reach every path: decode, prefill, chunks, groups, windows, tails, many splits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES
from quire.ops.operation import Case
from quire.ops.paged_batch import paged_batch

__all__ = ["make_inputs"]

_INT8 = ((torch.float32, torch.int8), (torch.bfloat16, torch.int8))
# (query_len, seq_len) per row
_DECODE = ((1, 1), (1, 17), (1, 64), (1, 129), (1, 1100))
_PREFILL = ((7, 7), (33, 33), (130, 130))
_MIXED = ((1, 90), (5, 70), (0, 3), (40, 600), (64, 64))
# (rows, query heads, kv heads, head_dim, block_size, window)
_SHAPES = (
    (_DECODE, 16, 8, 128, 16, None),
    (_DECODE, 3, 1, 64, 1, None),
    (_PREFILL, 4, 4, 32, 32, None),
    (_PREFILL, 8, 1, 40, 128, None),
    (_MIXED, 6, 2, 256, 16, None),
    (_MIXED, 4, 2, 72, 20, 50),
    (_DECODE, 2, 2, 96, 8, 1),
)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks; the pool is full of NaN around the tokens."""
    for dtype, cache_dtype in (*((dtype, dtype) for dtype in DTYPES), *_INT8):
        for rows, heads, kv_heads, head_dim, block_size, window in _SHAPES:
            batch = paged_batch(
                generator,
                rows,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                dtype=dtype,
                cache_dtype=cache_dtype,
            )
            yield Case(
                label=f"{dtype} over {cache_dtype}, {heads}/{kv_heads} heads of {head_dim}, "
                f"blocks of {block_size}, window {window}, rows {rows}",
                args=(
                    batch.q,
                    batch.k_cache,
                    batch.v_cache,
                    batch.block_table,
                    batch.query_start_loc,
                    batch.seq_lens,
                    head_dim**-0.5,
                    window,
                    batch.k_scale,
                    batch.v_scale,
                ),
            )
