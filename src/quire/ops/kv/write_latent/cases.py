"""Sizes of models and odd ones, every float dtype of rows and cache, padding.

Rows for int8 caches are exact in every order of sums, because a difference in their rounding may
move an element by a whole step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.kv.pages import empty_cache
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

_NUM_TOKENS, _NUM_BLOCKS, _BLOCK_SIZE, _MAX_POSITION = 9, 7, 4, 50
# (query heads, latent elements, rotated elements)
_SHAPES = ((16, 512, 64), (5, 256, 32), (3, 20, 10))


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for shape in _SHAPES:
            for cache_dtype in {dtype, torch.float32}:
                yield _case(generator, shape, dtype, cache_dtype)
            yield _case(generator, shape, dtype, torch.int8)


def _case(
    generator: torch.Generator,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> Case:
    heads, size, rotary = shape
    width = size + rotary
    angle = normal(generator, _MAX_POSITION, rotary // 2)
    cos, sin = angle.cos(), angle.sin()
    latent = normal(generator, _NUM_TOKENS, width + 3, dtype=dtype)[:, 3:]
    is_exact = cache_dtype == torch.int8
    if is_exact:  # a norm of 1, and quarter turns
        latent[:, :size] = latent[:, :size].sign()
        cos, sin = angle.sign() * (angle.abs() < 1), angle.sign() * (angle.abs() >= 1)
    slots = torch.randperm(_NUM_BLOCKS * _BLOCK_SIZE, generator=generator)[:_NUM_TOKENS]
    slots[3] = -1
    cache, scale = empty_cache(
        _NUM_BLOCKS, _BLOCK_SIZE, 1, width, cache_dtype, generator.device, value_dim=size
    )
    return Case(
        label=f"{dtype} into {cache_dtype}, {heads} heads of {size} + {rotary}",
        args=(
            normal(generator, _NUM_TOKENS, heads, width, dtype=dtype),
            normal(generator, _NUM_TOKENS, heads * rotary + 5, dtype=dtype)[:, 5:],
            latent,
            normal(generator, size, dtype=dtype),
            0.0 if is_exact else 1e-6,
            torch.randint(0, _MAX_POSITION, (_NUM_TOKENS,), generator=generator),
            cos,
            sin,
            cache,
            slots,
            scale,
        ),
    )
