"""Attention over latent planes on the CPU, beside the larger of reading and arithmetic.

    python -m benchmarks.kernels.latent_attention_cpu [--quick] [--threads N] [--output FILE]

Four layers of DeepSeek-V2-Lite (16 heads over one plane of 576 values per token, of which V is the
first 512), then of GLM-4.7-Flash (20 heads) and DeepSeek-V3 (128): a step in which 1, 4 or 16 rows
decode behind 4,096 tokens, and a prompt of 512 tokens behind 512. Random data, blocks in random
order in the pool of an engine, caches in bfloat16 and in 8 bits. The kernels are those that an
engine takes by the processor's flags; they are compared with the reference before. Each figure
takes turns with two limits: "the same blocks beside", a sum over the very blocks, and "product
beside", a bfloat16 product of 2,048 by 2,048 matrices in torch. "of the limit" is the time in which
the machine could read all bytes or do all operations by these two, whichever is longer, as a share
of the time of attention.
"""

# ruff: isort: skip_file
# kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks.kernels.kernel_figures import (
    SEED,
    Call,
    Figure,
    blocks_read,
    figures_by_turns,
    run,
)
import torch

from quire.compute.attention import KVPool
from quire.entrypoints.bench.machine import LimitProbe
from quire.config.kv_layout import KV_DTYPES, KVFormat, KVLayout, LayerKV, group_layers
from quire.ops import ALL_OPS, Team, check_provider, select
from quire.base.platform import detect_platform

KEY_DIM, VALUE_DIM, NUM_LAYERS, BLOCK_SIZE = 576, 512, 4, 16
CONTEXT, PROMPT = 4096, 512
ROWS = (1, 4, 16)
HEADS = (16, 20, 128)
CACHE_DTYPES = (torch.bfloat16, torch.int8)
PAGED_ATTENTION = ALL_OPS["paged_attention"]

Rows = Sequence[tuple[int, int]]


def filled_pool(num_blocks: int, dtype: torch.dtype, generator: torch.Generator) -> KVPool:
    """A pool of random planes, blocks in any order."""
    name = str(dtype).removeprefix("torch.")
    plane = LayerKV(KVFormat(1, KEY_DIM, VALUE_DIM, *KV_DTYPES[name], num_planes=1), "latent")
    layout = KVLayout(group_layers([plane] * NUM_LAYERS, BLOCK_SIZE), BLOCK_SIZE)
    pool = KVPool.allocate(layout, num_blocks, dtype, torch.device("cpu"))
    for layer in pool.layers.values():
        if layer.k_scale is None:
            layer.k.normal_(generator=generator)
        else:
            layer.k.random_(-127, 128, generator=generator)
            layer.k_scale.fill_(1 / 40)
    return pool


def step_calls(
    call: Callable[..., torch.Tensor],
    pool: KVPool,
    table: torch.Tensor,
    rows: Rows,
    num_heads: int,
    generator: torch.Generator,
) -> tuple[list[Call], float]:
    """Return the read of a step's blocks and attention over them, in all layers, and the operations
    of attention."""
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    shape = (int(starts[-1]), num_heads, KEY_DIM)
    q = torch.randn(shape, generator=generator).bfloat16()
    layers, tables = list(pool.layers.values()), table[: len(rows)]
    longest = rows[0][1]

    def attend() -> None:
        for layer in layers:
            call(
                q,
                layer.k,
                layer.v,
                tables,
                starts,
                lengths,
                KEY_DIM**-0.5,
                None,
                layer.k_scale,
                layer.v_scale,
                max_query_len=rows[0][0],
            )

    read = blocks_read([layer.k for layer in layers], tables, longest)
    token_bytes = layers[0].k.stride(1) * layers[0].k.itemsize
    num_bytes = float(NUM_LAYERS * len(rows) * longest * token_bytes)
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in rows)
    operations = 2.0 * NUM_LAYERS * num_heads * pairs * (KEY_DIM + VALUE_DIM)
    return [
        ("the same blocks beside", "GB/s", num_bytes, read),
        ("attention", "GB/s", num_bytes, attend),
    ], operations


def figures_of(
    label: str, calls: Sequence[Call], operations: float, product: Call, repeats: int
) -> Iterator[Figure]:
    """The rates of the calls and of a product by turns, then attention's share of its limit."""
    read, attention, multiply = figures_by_turns([*calls, product], repeats)
    num_bytes = calls[0][2]
    least = max(num_bytes / read.median, operations / multiply.median)
    yield read
    yield multiply
    for what, unit, factor in (
        (", read", "GB/s", 1.0),
        ("", "GFLOP/s", operations / num_bytes),
        (", of the limit", "%", 100 * least / num_bytes),
    ):
        low, median, high = (
            factor * rate for rate in (attention.low, attention.median, attention.high)
        )
        yield Figure(label + what, unit, median, low, high, repeats)


def latent_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Decode and prompts, of one model and cache dtype if `quick`."""
    platform, team = detect_platform(), Team(torch.get_num_threads())
    name, _ = select(PAGED_ATTENTION, platform)
    provider = PAGED_ATTENTION.provider(name)
    if provider is None:
        raise SystemExit("No kernels are compiled here. Run: python -m quire.ops.compile")
    report = check_provider(PAGED_ATTENTION, provider)
    if not report.ok:
        raise SystemExit("\n".join(report.failures))
    call, generator = provider.load(team), torch.Generator().manual_seed(SEED)
    probe = LimitProbe(torch.get_num_threads())
    product: Call = ("product beside", "GFLOP/s", 2.0 * 2048**3, probe.call("bf16"))
    num_blocks = max(ROWS) * CONTEXT // BLOCK_SIZE
    table = torch.randperm(num_blocks, generator=generator).int().view(max(ROWS), -1)
    steps: list[Rows] = [*([(1, CONTEXT)] * count for count in ROWS), [(PROMPT, 2 * PROMPT)]]
    for dtype in CACHE_DTYPES[:1] if options.quick else CACHE_DTYPES:
        pool = filled_pool(num_blocks, dtype, generator)
        for num_heads in HEADS[:1] if options.quick else HEADS:
            for rows in steps:
                calls, operations = step_calls(call, pool, table, rows, num_heads, generator)
                what = f"{len(rows)} x {rows[0][0]} of {rows[0][1]}"
                label = f"{name}, {num_heads} heads, {what}, {dtype}"
                yield from figures_of(label, calls, operations, product, options.repeats)


if __name__ == "__main__":
    run("latent_attention_cpu", __doc__, latent_figures)
