"""The kernels of attention in other tiles than the chosen ones, and decode over mixed lengths.

`quire.ops.attention.paged_attention.triton_decode` says what a compiler's report can tell. Only a
GPU says which tile is fastest. "checks" compares the chosen tile alone with the reference's
numbers, so another one is a lead and not a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.attention import BEYOND_CACHE, BLOCK_SIZE, SHAPES, TINY, Heads, random
from benchmarks.gpu.part import Part
from quire.compute.attention import KVPool
from quire.config.kv_layout import KVFormat, KVLayout
from quire.ops.attention.paged_attention.triton_decode import (
    DecodeTile,
    attend_decodes,
    decode_tile,
)
from quire.ops.attention.paged_attention.triton_launch import Launch
from quire.ops.attention.paged_attention.triton_prefill import (
    PromptTile,
    attend_prompts,
    prompt_tile,
)

__all__ = ["decode_tiles", "prompt_tiles"]

DECODE_TILES = (
    DecodeTile(keys=64, warps=4, stages=3, programs=2),
    DecodeTile(keys=64, warps=4, stages=5, programs=3),
    DecodeTile(keys=32, warps=4, stages=5, programs=3),
    DecodeTile(keys=32, warps=4, stages=7, programs=3),
    DecodeTile(keys=128, warps=8, stages=5, programs=1),
)
PROMPT_TILES = (
    PromptTile(queries=128, keys=64, warps=8, stages=2),
    PromptTile(queries=128, keys=64, warps=8, stages=4),
    PromptTile(queries=128, keys=32, warps=8, stages=3),
    PromptTile(queries=64, keys=64, warps=8, stages=3),
    PromptTile(queries=64, keys=64, warps=4, stages=3),
)


def decode_tiles(part: Part) -> None:
    """Bytes of K and V of one query per row: few long rows, many short ones, and 256 of 100 to
    2,048 tokens, which the pieces are there to balance."""
    mixed = [100 + (1949 * row) // 256 for row in range(256)]
    works = {"1 x 8192": [8192], "32 x 2048": [2048] * 32, "256 of 100 to 2048": mixed}
    kinds = [(heads, torch.bfloat16) for heads in SHAPES] + [(SHAPES[0], torch.int8)]
    tiles: Sequence[DecodeTile] = DECODE_TILES
    if part.is_dry:
        works, kinds, tiles = {"2 of 5 and 40": [5, 40]}, [(TINY, torch.float16)], tiles[:1]
    elif part.quick:
        kinds = kinds[:1]
    for heads, dtype in kinds:
        chosen = decode_tile(heads.head_dim, dtype.itemsize)
        for name, lengths in works.items():
            size = 2.0 * sum(lengths) * heads.num_kv_heads * heads.head_dim * dtype.itemsize
            copies = 1 if part.is_dry else max(1, int(BEYOND_CACHE / size))
            launches = [new_launch(part, heads, dtype, lengths, 1) for _ in range(copies)]
            for tile in (chosen, *(tile for tile in tiles if tile != chosen)):

                def run(launches: list[Launch] = launches, tile: DecodeTile = tile) -> None:
                    for launch in launches:
                        attend_decodes(launch, tile)

                label = f"{heads.model}, {name}, {dtype} cache, {describe(tile, chosen)}"
                part.rate(label, "GB/s", size * copies, part.seconds_of(run))


def prompt_tiles(part: Part) -> None:
    """Arithmetic of one prompt, the visible half of the scores only."""
    shapes, length = ((TINY,), 20) if part.is_dry else (SHAPES, 4096)
    for heads in shapes[:1] if part.quick else shapes:
        launch = new_launch(part, heads, torch.bfloat16, [length], length)
        chosen = prompt_tile(heads.head_dim, 2, quantized=False)
        operations = 4.0 * length * (length + 1) / 2 * heads.num_heads * heads.head_dim
        others = () if part.is_dry else (tile for tile in PROMPT_TILES if tile != chosen)
        for tile in (chosen, *others):

            def run(launch: Launch = launch, tile: PromptTile = tile) -> None:
                attend_prompts(launch, tile)

            label = f"{heads.model}, {length}, {describe(tile, chosen)}"
            part.rate(label, "GFLOP/s", operations, part.seconds_of(run))


def describe(tile: DecodeTile | PromptTile, chosen: DecodeTile | PromptTile) -> str:
    """Describe a tile for people."""
    return f"{tile}{', the chosen one' if tile == chosen else ''}"


def new_launch(
    part: Part, heads: Heads, dtype: torch.dtype, lengths: Sequence[int], query_len: int
) -> Launch:
    """Rows of `lengths` tokens over blocks in random order; tables are as wide as those of rows of
    8,192 tokens, as a captured step has them."""
    device = part.device
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    kv_format = KVFormat.plain(
        heads.num_kv_heads, heads.head_dim, str(dtype).removeprefix("torch.")
    )
    layout = KVLayout.of_windows([None], BLOCK_SIZE, kv_format)
    layer = KVPool.allocate(layout, sum(counts), dtype, device).layers[0]
    for cache, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        if scales is None:
            cache.normal_()
        else:
            cache.random_(-127, 128)
            scales.uniform_(0.005, 0.01)
    order = torch.randperm(sum(counts), device=device).to(torch.int32)
    table = torch.zeros((len(lengths), 8192 // BLOCK_SIZE), dtype=torch.int32, device=device)
    for row, blocks in enumerate(order.split(counts)):
        table[row, : len(blocks)] = blocks
    q = random(part, len(lengths) * query_len, heads.num_heads, heads.head_dim)
    return Launch(
        q=q,
        k_cache=layer.k,
        v_cache=layer.v,
        block_table=table,
        query_start_loc=query_len * torch.arange(len(lengths) + 1, device=device).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        scale=heads.head_dim**-0.5,
        window=None,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        soft_cap=None,
        alibi_slopes=None,
        sinks=None,
        out=torch.empty_like(q),
    )
