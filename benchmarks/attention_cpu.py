"""Paged attention on the CPU: decode bandwidth and prefill arithmetic, beside the machine's limits.

    python benchmarks/attention_cpu.py [--quick] [--threads N] [--output FILE]

Heads of Qwen3-0.6B: 16 query heads, 8 kv heads of 128, blocks of 16 tokens, random data. Every
provider is compared with the reference before it is timed. Figures are medians over the repeats,
with the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.config import env

env.limit_spinning()  # as the engine does, before torch starts its threads

import torch  # noqa: E402

from quire.ops import ALL_OPS, REFERENCE, check_provider, select  # noqa: E402
from quire.ops.inputs import paged_batch  # noqa: E402
from quire.platform import Platform, detect_platform  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
SEED = 0
PAGED_ATTENTION = ALL_OPS["paged_attention"]
DECODE_SEQUENCES = (1, 8, 32)
DECODE_LENGTHS = (256, 1024, 4096)
PREFILL_LENGTHS = (64, 512, 2048)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: median, lowest and highest over the repeats, in `unit`."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    repeats: int


def measure(
    name: str, unit: str, amount: float, call: Callable[[], object], repeats: int
) -> Figure:
    """`amount` per second of `call`, in billions; one untimed call before, and at least 20 ms of
    calls per repeat."""
    started = time.perf_counter()
    call()
    rounds = max(1, int(0.02 / max(time.perf_counter() - started, 1e-6)))
    rates: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(rounds):
            call()
        rates.append(amount * rounds / (time.perf_counter() - started) / 1e9)
    return Figure(name, unit, statistics.median(rates), min(rates), max(rates), repeats)


def machine_limits(repeats: int) -> Iterator[Figure]:
    """A sum over 1 GiB, and a 2048³ product: what bandwidth and arithmetic can be had here."""
    data = torch.ones(2**28)
    yield measure("memory read", "GB/s", data.nbytes, data.sum, repeats)
    del data
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, 2048, 2048).to(dtype)
        yield measure(f"matmul {dtype}", "GFLOP/s", 2 * 2048**3, lambda a=a, b=b: a @ b, repeats)


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
    return measure(name, unit, amount, lambda: call(*arguments), repeats)


def attention_figures(platform: Platform, repeats: int, quick: bool) -> Iterator[Figure]:
    """Every provider of this machine that equals the reference, over dtypes and shapes."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Paged attention on the CPU")
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--threads", type=int, help="torch's own number when not given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave the longest sequences out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    platform, load_before = detect_platform(), os.getloadavg()
    figures: list[Figure] = []
    with torch.inference_mode():
        for source in (
            machine_limits(options.repeats),
            attention_figures(platform, options.repeats, options.quick),
        ):
            for figure in source:
                figures.append(figure)
                print(
                    f"{figure.name:50s} {figure.median:8.1f} {figure.unit}"
                    f"  ({figure.low:.1f} to {figure.high:.1f})",
                    flush=True,
                )
    if options.output:
        report = {
            "benchmark": "attention_cpu",
            "command": " ".join(sys.argv),
            "commit": _commit(),
            "seed": SEED,
            "machine": {
                "cpu": platform.cpu.model_name,
                "cores": platform.cpu.num_cores,
                "threads": torch.get_num_threads(),
                "system": host.platform(),
                "torch": torch.__version__,
                "load_average": {"before": load_before, "after": os.getloadavg()},
            },
            "figures": [asdict(figure) for figure in figures],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
