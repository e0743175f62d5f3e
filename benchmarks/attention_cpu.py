"""Paged attention on the CPU: decode bandwidth and prefill arithmetic, beside the machine's limits.

    python benchmarks/attention_cpu.py [--quick] [--threads N] [--output FILE]

Heads of Qwen3-0.6B: 16 query heads, 8 kv heads of 128, random data, blocks in random order in the
pool of an engine. Every provider is compared with the reference before it is timed. Figures are
medians over the repeats, with the lowest and highest. Each decode takes turns with sums over 512
MiB of float32, since the bandwidth of a shared machine changes from one minute to the next: "read
beside" in ordinary memory, "read of huge pages beside" in memory like the pool's, which is faster.
"""

# ruff: isort: skip_file  kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from kernel_figures import SEED, Call, Figure, figures_by_turns, run

from quire.attention import KVPool, LayerCache
from quire.config.kv_layout import KV_DTYPES, KVGroup, KVLayout
from quire.ops import ALL_OPS, REFERENCE, Team, check_provider, select
from quire.ops.compile import ISAS
from quire.ops.huge_pages import map_huge_pages
from quire.ops.paged_batch import PagedBatch, paged_batch
from quire.platform import detect_platform

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
UNIT = "paged_attention"  # of csrc; a widened instruction set may have it from a narrower one
PAGED_ATTENTION = ALL_OPS["paged_attention"]
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
INT8 = (torch.bfloat16, torch.int8)
LONG = [(1, 4096)] * 8
DECODES = ([(1, 256)], [(1, 4096)], [(1, 1024)] * 8, [(1, 1024)] * 32)
BLOCK_SIZES = (16, 32, 64, 128)
PREFILLS = (64, 512, 2048)

Attention = Callable[..., torch.Tensor]
Rows = Sequence[tuple[int, int]]


def in_a_pool(batch: PagedBatch) -> LayerCache:
    """The batch's K and V where an engine has them, whose pages may be huge."""
    num_blocks, block_size, kv_heads, head_dim = batch.k_cache.shape
    dtype = batch.k_cache.dtype
    sizes = KV_DTYPES[str(dtype).removeprefix("torch.")]
    layout = KVLayout((KVGroup((0,)),), block_size, kv_heads, head_dim, *sizes)
    layer = KVPool.allocate(layout, num_blocks, dtype, batch.k_cache.device).layers[0]
    layer.k.copy_(batch.k_cache)
    layer.v.copy_(batch.v_cache)
    for scales, given in ((layer.k_scale, batch.k_scale), (layer.v_scale, batch.v_scale)):
        if scales is not None and given is not None:
            scales.copy_(given)
    return layer


def attention_call(
    label: str,
    call: Attention,
    rows: Rows,
    dtypes: tuple[torch.dtype, torch.dtype],
    block_size: int = BLOCK_SIZE,
) -> Call:
    """Bytes of K, V and scales when every row has one query, else operations (the visible half of
    the scores only). dtypes: of the queries and of the cache."""
    dtype, cache_dtype = dtypes
    batch = paged_batch(
        torch.Generator().manual_seed(SEED),
        rows,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    cache = in_a_pool(batch)
    arguments = (
        batch.q,
        cache.k,
        cache.v,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        HEAD_DIM**-0.5,
        None,
        cache.k_scale,
        cache.v_scale,
    )
    work = f"decode {len(rows)} x {rows[0][1]}" if rows[0][0] == 1 else f"prefill {rows[0][1]}"
    name = f"{work}, blocks of {block_size}, {cache_dtype} cache, {label}"
    if rows[0][0] == 1:
        tokens = sum(length for _, length in rows)
        amount = 2.0 * tokens * cache.k.stride(1) * cache_dtype.itemsize
        return name, "GB/s", amount, lambda: call(*arguments)
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in rows)
    return name, "GFLOP/s", 4.0 * pairs * HEADS * HEAD_DIM, lambda: call(*arguments)


def provider_figures(label: str, call: Attention, quick: bool, repeats: int) -> Iterator[Figure]:
    """Decode at all lengths, block sizes and cache dtypes; prefill."""
    huge = map_huge_pages(2**29)[: 2**29].view(torch.float32).fill_(1)
    reads: list[Call] = [
        (name, "GB/s", float(memory.nbytes), memory.sum)
        for name, memory in (
            ("read beside", torch.ones(2**27)),
            ("read of huge pages beside", huge),
        )
    ]
    for dtypes in (*DTYPES, INT8):
        for block_size in BLOCK_SIZES[:1] if quick else BLOCK_SIZES:
            decode = attention_call(label, call, LONG, dtypes, block_size)
            yield from figures_by_turns([*reads, decode], repeats)
        for rows in () if quick else DECODES:
            yield from figures_by_turns([attention_call(label, call, rows, dtypes)], repeats)
        for length in PREFILLS[1:2] if quick else PREFILLS:
            prefill = attention_call(label, call, [(length, length)], dtypes)
            yield from figures_by_turns([prefill], repeats)


def attention_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Every provider of this machine that equals the reference, over dtypes and shapes."""
    platform, team = detect_platform(), Team(torch.get_num_threads())
    own = {f"cpu_{isa.name}" for isa in ISAS if isa.extends is None or UNIT in isa.units}
    for provider in PAGED_ATTENTION.providers:
        if provider.name not in own or provider.unavailable(platform) is not None:
            continue
        report = check_provider(PAGED_ATTENTION, provider)
        if not report.ok:
            raise SystemExit("\n".join(report.failures))
        call = provider.load(team)
        yield from provider_figures(provider.name, call, options.quick, options.repeats)
    _, reference = select(PAGED_ATTENTION, platform, REFERENCE)
    for rows in ([(1, 1024)] * 8, [(512, 512)]):
        call = attention_call(REFERENCE, reference, rows, DTYPES[0])
        yield from figures_by_turns([call], options.repeats)


if __name__ == "__main__":
    run("attention_cpu", "Paged attention on the CPU", attention_figures)
