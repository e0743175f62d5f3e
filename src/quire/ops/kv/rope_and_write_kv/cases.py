"""Rows of a merged projection with and without norms and rotation, over every dtype of cache.

int8 caches come without norms and rotation, because a difference in their rounding may move an
element by a whole step. tests/ops/test_rope_and_write_kv.py compares those bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.kv.pages import empty_cache
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

_NUM_TOKENS, _NUM_BLOCKS, _BLOCK_SIZE, _MAX_POSITION = 9, 7, 4, 50
# (query heads, kv heads, head_dim, rotary_dim)
_SHAPES = ((16, 8, 128, 128), (3, 1, 40, 36), (4, 4, 80, 32))


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for shape in _SHAPES:
            for normed in (False, True):
                yield _case(generator, shape, dtype, dtype, normed=normed, rotated=True)
            yield _case(generator, shape, dtype, torch.int8, normed=False, rotated=False)


def _case(
    generator: torch.Generator,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    normed: bool,
    rotated: bool,
) -> Case:
    heads, kv_heads, head_dim, rotary_dim = shape
    width = (heads + 2 * kv_heads) * head_dim
    qkv = normal(generator, _NUM_TOKENS, width + 5, dtype=dtype)[:, :width]
    positions = torch.randint(0, _MAX_POSITION, (_NUM_TOKENS,), generator=generator)
    angle = normal(generator, _MAX_POSITION, rotary_dim // 2)
    cos, sin = (angle.cos(), angle.sin()) if rotated else (None, None)
    cache = (_NUM_BLOCKS, _BLOCK_SIZE, kv_heads, head_dim, cache_dtype)
    (k_cache, k_scale), (v_cache, v_scale) = empty_cache(*cache), empty_cache(*cache)
    slots = torch.randperm(_NUM_BLOCKS * _BLOCK_SIZE, generator=generator)[:_NUM_TOKENS]
    slots[3] = -1
    weights = normal(generator, 2, head_dim, dtype=dtype) if normed else (None, None)
    return Case(
        label=f"{dtype} into {cache_dtype}, {heads}/{kv_heads} heads of {head_dim}, norms {normed}",
        args=(
            qkv,
            heads,
            positions,
            cos,
            sin,
            k_cache,
            v_cache,
            slots,
            k_scale,
            v_scale,
            *weights,
            1e-6,
        ),
    )
