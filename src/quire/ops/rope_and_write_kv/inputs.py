"""Rows of a merged projection with and without norms and rotation, over every dtype of cache.

int8 caches come without norms and rotation: where these round differently an element may move by a
whole step. tests/ops/test_rope_and_write_kv.py has the rest, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.kv_pages import empty_cache
from quire.ops.operation import Case

__all__ = ["make_inputs"]

_MAX_POSITION = 50
# (query heads, kv heads, head_dim, rotary_dim)
_SHAPES = ((16, 8, 128, 128), (3, 1, 40, 36), (4, 4, 80, 32))


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for heads, kv_heads, head_dim, rotary_dim in _SHAPES:
            for cache_dtype in (dtype, torch.int8):
                exact = cache_dtype == torch.int8
                for normed in (False,) if exact else (False, True):
                    num_tokens, block_size = 9, 4
                    width = (heads + 2 * kv_heads) * head_dim
                    k_cache, k_scale = empty_cache(7, block_size, kv_heads, head_dim, cache_dtype)
                    v_cache, v_scale = empty_cache(7, block_size, kv_heads, head_dim, cache_dtype)
                    slots = torch.randperm(7 * block_size, generator=generator)[:num_tokens]
                    slots[3] = -1
                    angle = normal(generator, _MAX_POSITION, rotary_dim // 2)
                    weights = normal(generator, 2, head_dim, dtype=dtype) if normed else (None, None)
                    yield Case(
                        label=f"{dtype} into {cache_dtype}, {heads}/{kv_heads} heads of "
                        f"{head_dim}, norms {normed}",
                        args=(
                            normal(generator, num_tokens, width + 5, dtype=dtype)[:, :width],
                            heads,
                            torch.randint(0, _MAX_POSITION, (num_tokens,), generator=generator),
                            None if exact else angle.cos(),
                            None if exact else angle.sin(),
                            k_cache,
                            v_cache,
                            slots,
                            k_scale,
                            v_scale,
                            *weights,
                            1e-6,
                        ),
                    )
