"""Batches that reach every path: decode, prefill, chunks, groups, windows, tails, many splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from quire.ops.attention.paged_batch import paged_batch, random_key_bias, random_last_key
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["WIDTHS", "make_inputs"]

WIDTHS = "widths"
"""Entry of `Provider.lacks` for kernels that take K and V of one width alone."""

_INT8 = ((torch.float32, torch.int8), (torch.bfloat16, torch.int8))
# (query_len, seq_len) per row
_DECODE = ((1, 1), (1, 17), (1, 64), (1, 129), (1, 1100))
_PREFILL = ((7, 7), (33, 33), (130, 130))
_MIXED = ((1, 90), (5, 70), (0, 3), (40, 600), (64, 64))
_PADDED = ((1, 40), (1, 0), (1, 300))
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
_LONGEST = max(length for rows in (_DECODE, _PREFILL, _MIXED) for _, length in rows)
# The same with what else scores may be, in some of the dtypes.
_SCORED = (
    (torch.float32, torch.float32, (_PADDED, 4, 2, 40, 16, None), ("alibi_slopes", "sinks")),
    (torch.float16, torch.float16, (_MIXED, 6, 2, 64, 16, None), ("soft_cap", "alibi_slopes")),
    (torch.bfloat16, torch.int8, (_MIXED, 4, 2, 40, 16, 50), ("soft_cap", "sinks")),
    (torch.bfloat16, torch.bfloat16, (_DECODE, 4, 1, 64, 16, 300), ("soft_cap", "sinks")),
    (torch.bfloat16, torch.bfloat16, (_MIXED, 4, 2, 256, 16, 50), ("soft_cap",)),
    *(
        (dtype, cache_dtype, shape, ("alibi_slopes",))
        for dtype, cache_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
        for shape in ((_DECODE, 8, 8, 64, 16, None), (_PREFILL, 6, 3, 64, 16, None))
    ),
    (torch.bfloat16, torch.int8, (_PREFILL, 8, 8, 64, 16, None), ("alibi_slopes", "value_bias")),
    (torch.bfloat16, torch.int8, (_MIXED, 4, 2, 40, 16, 50), ("soft_cap", "key_bias")),
    (torch.float32, torch.float32, (_PREFILL, 4, 2, 40, 16, None), ("last_key", "alibi_slopes")),
    (torch.float16, torch.float16, (_MIXED, 4, 2, 64, 16, 50), ("last_key", "soft_cap", "sinks")),
    (torch.bfloat16, torch.int8, (_MIXED, 6, 2, 64, 16, None), ("last_key", "key_bias")),
    *(
        (dtype, cache_dtype, shape, ("last_key",))
        for dtype, cache_dtype in (*((dtype, dtype) for dtype in DTYPES), *_INT8)
        for shape in (
            (_MIXED, 6, 2, 64, 16, None),
            (_MIXED, 4, 2, 40, 5, 50),
            (_PREFILL, 8, 1, 128, 128, None),
        )
    ),
    *(
        (dtype, cache_dtype, shape, ("sinks",))
        for dtype, cache_dtype in (*((dtype, dtype) for dtype in DTYPES), *_INT8)
        for shape in (
            (_DECODE, 8, 2, 64, 16, 128),
            (_PREFILL, 8, 1, 128, 16, None),
            (_MIXED, 6, 2, 40, 16, None),
        )
    ),
    *(
        (dtype, torch.int8, shape, ("key_bias", "value_bias"))
        for dtype in (torch.float32, torch.bfloat16)
        for shape in (
            (_DECODE, 14, 2, 64, 16, None),
            (_PREFILL, 7, 1, 72, 16, None),
            (_MIXED, 6, 2, 128, 16, 50),
        )
    ),
)

# One plane, of which V is the first part: (rows, heads, key_dim, value_dim, block_size, window)
_PLANES = (
    (_DECODE, 16, 576, 512, 16, None),
    (_PREFILL, 20, 96, 64, 16, None),
    (_MIXED, 5, 48, 32, 20, 50),
    (_MIXED, 40, 288, 256, 16, None),
    (((1, 70), (3, 90)), 128, 576, 512, 32, None),
    (_DECODE, 4, 25, 20, 5, None),
)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; the pool is full of NaN around the tokens."""
    for dtype, cache_dtype in (*((dtype, dtype) for dtype in DTYPES), *_INT8):
        for shape in _SHAPES:
            yield _case(generator, dtype, cache_dtype, *shape)
    for dtype, cache_dtype, shape, names in _SCORED:
        rows, heads, kv_heads, head_dim, _, _ = shape
        every = {
            "soft_cap": 2.0,  # near the scores, so that it has an effect
            "alibi_slopes": 2.0 ** -(8 / heads * torch.arange(1, heads + 1)),
            "sinks": 2 * torch.randn(heads, generator=generator) + 1,  # some above all scores
            "key_bias": random_key_bias(generator, kv_heads, head_dim, _LONGEST),
            "value_bias": normal(generator, kv_heads, head_dim),
            "last_key": random_last_key(generator, rows),
        }
        yield _case(generator, dtype, cache_dtype, *shape, {name: every[name] for name in names})
    for dtype, cache_dtype in (*((dtype, dtype) for dtype in DTYPES), *_INT8):
        for rows, heads, key_dim, value_dim, block_size, window in _PLANES:
            shape = (rows, heads, 1, key_dim, block_size, window)
            yield _case(generator, dtype, cache_dtype, *shape, value_dim=value_dim)


def _case(
    generator: torch.Generator,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    rows: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    scored: Mapping[str, Any] = MappingProxyType({}),
    *,
    value_dim: int | None = None,
) -> Case:
    batch = paged_batch(
        generator,
        rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        value_dim=value_dim,
    )
    widths = head_dim if value_dim is None else f"{head_dim} and {value_dim}"
    return Case(
        label=f"{dtype} over {cache_dtype}, {heads}/{kv_heads} heads of {widths}, "
        f"blocks of {block_size}, window {window}, {', '.join(scored)} rows {rows}",
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
        kwargs=scored,
        needs=frozenset() if value_dim is None else frozenset({WIDTHS}),
    )
