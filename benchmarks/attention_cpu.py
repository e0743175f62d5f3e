"""Paged attention on the CPU: decode bandwidth and prefill arithmetic, beside the machine's limits.

    python benchmarks/attention_cpu.py [--quick] [--threads N] [--output FILE]

Heads of Qwen3-0.6B: 16 query heads, 8 kv heads of 128, blocks of 16 tokens, random data. Every
provider is compared with the reference before it is timed. Figures are medians over the repeats,
with the lowest and highest.
"""

# ruff: isort: skip_file  kernel_figures settles how threads wait before torch is imported
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from kernel_figures import SEED, Figure, figures_by_turns, run

from quire.ops import ALL_OPS, REFERENCE, check_provider, select
from quire.ops.paged_batch import paged_batch
from quire.platform import detect_platform

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
PAGED_ATTENTION = ALL_OPS["paged_attention"]
DECODE_SEQUENCES = (1, 8, 32)
DECODE_LENGTHS = (256, 1024, 4096)
PREFILL_LENGTHS = (64, 512, 2048)


def attention_figure(
    name: str,
    call: Callable[..., torch.Tensor],
    rows: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    repeats: int,
) -> Figure:
    """Bytes of K and V per second when every row has one query, else operations per second (the
    visible half of the scores only)."""
    batch = paged_batch(
        torch.Generator().manual_seed(SEED),
        rows,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    arguments = (
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        HEAD_DIM**-0.5,
    )
    if all(queries == 1 for queries, _ in rows):
        tokens = sum(length for _, length in rows)
        amount, unit = float(tokens * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize), "GB/s"
    else:
        pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in rows)
        amount, unit = 4.0 * pairs * HEADS * HEAD_DIM, "GFLOP/s"
    (figure,) = figures_by_turns([(name, unit, amount, lambda: call(*arguments))], repeats)
    return figure


def attention_figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Every provider of this machine that equals the reference, over dtypes and shapes."""
    platform, repeats, quick = detect_platform(), options.repeats, options.quick
    for provider in PAGED_ATTENTION.providers:
        if provider.unavailable(platform) is not None:
            continue
        report = check_provider(PAGED_ATTENTION, provider)
        if not report.ok:
            raise SystemExit("\n".join(report.failures))
        _, call = select(PAGED_ATTENTION, platform, provider.name)
        for dtype in (torch.bfloat16, torch.float32):
            label = f"{provider.name} {dtype}"
            for sequences in DECODE_SEQUENCES:
                for length in DECODE_LENGTHS[:2] if quick else DECODE_LENGTHS:
                    rows = [(1, length)] * sequences
                    name = f"decode {sequences} x {length} {label}"
                    yield attention_figure(name, call, rows, dtype, repeats)
            for length in PREFILL_LENGTHS[:2] if quick else PREFILL_LENGTHS:
                name = f"prefill {length} {label}"
                yield attention_figure(name, call, [(length, length)], dtype, repeats)
    _, reference = select(PAGED_ATTENTION, platform, REFERENCE)
    for name, rows in (("decode 8 x 1024", [(1, 1024)] * 8), ("prefill 512", [(512, 512)])):
        label = f"{name} {REFERENCE} torch.float32"
        yield attention_figure(label, reference, rows, torch.float32, repeats)


if __name__ == "__main__":
    run("attention_cpu", "Paged attention on the CPU", attention_figures)
