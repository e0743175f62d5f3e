"""Tokens for scattered slots of a pool full of NaN, with padding among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.kv_pages import empty_cache
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for cache_dtype in {dtype, torch.bfloat16, torch.int8}:
            for num_tokens, kv_heads, head_dim, block_size in ((1, 8, 128, 16), (33, 2, 40, 5)):
                fused = normal(generator, num_tokens, 2 * kv_heads, head_dim, dtype=dtype)
                num_blocks = num_tokens + 2
                fused[-1, 0] *= 1e-30  # a tiny scale
                shape = (num_blocks, block_size, kv_heads, head_dim)
                k_cache, k_scale = empty_cache(*shape, cache_dtype)
                v_cache, v_scale = empty_cache(*shape, cache_dtype)
                slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
                slots[1::7] = -1
                yield Case(
                    label=f"{dtype} into {cache_dtype}, {num_tokens} tokens",
                    args=(
                        fused[:, :kv_heads],
                        fused[:, kv_heads:],
                        k_cache,
                        v_cache,
                        slots,
                        k_scale,
                        v_scale,
                    ),
                )
