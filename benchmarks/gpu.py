"""Kernels on a GPU: each operation against its reference, decode bandwidth, prefill arithmetic.

    python benchmarks/gpu.py [--quick] [--output FILE]

Checks come first: every case of every operation with a provider in Triton, computed on the GPU and
by the reference on the CPU. Then the limits of the GPU (a copy of 2 GiB, read and written; bfloat16
products of 8192³), attention of single queries at the head shapes of Qwen3-0.6B and Llama-3.1-8B
(bytes of K and V per second) and of prompts (visible half of the scores only). Random data in
blocks of random order. Times are medians over replays of a CUDA graph, so that they hold no launch;
small inputs take turns with copies of themselves that together do not fit the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from triton.testing import do_bench_cudagraph

from quire.attention import KVPool
from quire.bench.machine import current_commit, describe_machine
from quire.config.kv_layout import KV_DTYPES, KVGroup, KVLayout
from quire.ops import ALL_OPS, CheckReport, Op, Provider, check_provider
from quire.ops.paged_attention.triton import paged_attention
from quire.platform import detect_platform

SEED = 0
BLOCK_SIZE = 16
BEYOND_CACHE = 2**28
"""Bytes that no L2 cache holds (50 MiB on an H200)."""

# (name, query heads, kv heads, head_dim)
SHAPES = (("Qwen3-0.6B", 16, 8, 128), ("Llama-3.1-8B", 32, 8, 128))
BATCHES, LENGTHS = (1, 8, 32, 256), (128, 512, 2048, 8192)
PROMPTS = (512, 4096, 16384)
CACHE_DTYPES = (torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True)
class Figure:
    """Work per second in `unit` at the median, lowest and highest time of the replays."""

    name: str
    unit: str
    median: float
    low: float
    high: float


def main() -> None:
    """Check, measure, print, record. Ends with 1 when an operation disagrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(SEED)
    checks = list(check_all(device))
    figures: list[Figure] = []
    with torch.inference_mode():
        for figure in all_figures(device, options.quick):
            figures.append(figure)
            span = f"({figure.low:.1f} to {figure.high:.1f})"
            print(f"{figure.name:60s} {figure.median:10.1f} {figure.unit} {span}", flush=True)
    wrong = [failure for check in checks for failure in check.failures]
    if options.output:
        report = {
            "benchmark": "gpu",
            "command": " ".join(sys.argv),
            "commit": current_commit(),
            "seed": SEED,
            "gpu": torch.cuda.get_device_name(device),
            "machine": asdict(describe_machine()),
            "checks": [asdict(check) for check in checks],
            "figures": [asdict(figure) for figure in figures],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


def check_all(device: torch.device) -> Iterator[CheckReport]:
    """Every operation that has a provider in Triton. Raises SystemExit where there is no GPU."""
    platform = detect_platform("cuda")
    for op in ALL_OPS.values():
        provider = op.provider("triton")
        if provider is None:
            continue
        if (reason := provider.unavailable(platform)) is not None:
            raise SystemExit(f"nothing to measure: {reason}")
        report = check_op(op, provider, device)
        print(f"{op.name:24s} {report.num_cases} cases, {len(report.failures)} wrong", flush=True)
        for failure in report.failures[:3]:
            print(f"  {failure}")
        yield report


def check_op(op: Op, provider: Provider, device: torch.device) -> CheckReport:
    """A kernel that does not run at all is a failure, and the next one is checked."""
    try:
        return check_provider(op, provider, device=device)
    except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
        failure = f"{op.name} raised {type(error).__name__}: {error}"
        return CheckReport(op.name, provider.name, 0, (failure,))


def all_figures(device: torch.device, quick: bool) -> Iterator[Figure]:
    """The limits, then attention."""
    yield from gpu_limits(device)
    for shape in SHAPES[:1] if quick else SHAPES:
        for cache_dtype in CACHE_DTYPES[:1] if quick else CACHE_DTYPES:
            for batch in BATCHES:
                for length in LENGTHS[2:3] if quick else LENGTHS:
                    yield decode_figure(device, shape, cache_dtype, batch, length)
        for length in PROMPTS[1:2] if quick else PROMPTS:
            yield prefill_figure(device, shape, length)


def gpu_limits(device: torch.device) -> Iterator[Figure]:
    """What can be had of bandwidth and arithmetic, never measured on zeros."""
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    yield timed("copy of 2 GiB", "GB/s", 2.0 * source.nbytes, lambda: target.copy_(source))
    a, b = torch.randn(2, 8192, 8192, device=device).bfloat16()
    yield timed("bfloat16 product of 8192³", "GFLOP/s", 2.0 * 8192**3, lambda: torch.matmul(a, b))


def decode_figure(
    device: torch.device,
    shape: tuple[str, int, int, int],
    cache_dtype: torch.dtype,
    batch: int,
    length: int,
) -> Figure:
    """One query per row over `length` tokens; bytes of K and V, without scales."""
    model, _, kv_heads, head_dim = shape
    bytes_read = 2.0 * batch * length * kv_heads * head_dim * cache_dtype.itemsize
    copies = max(1, int(BEYOND_CACHE / bytes_read))
    calls = [attention_call(device, shape, cache_dtype, batch, 1, length) for _ in range(copies)]

    def run() -> None:
        for call in calls:
            call()

    name = f"{model}, decode {batch} x {length}, {cache_dtype} cache"
    return timed(name, "GB/s", bytes_read * copies, run)


def prefill_figure(device: torch.device, shape: tuple[str, int, int, int], length: int) -> Figure:
    """One prompt without a prefix."""
    model, heads, _, head_dim = shape
    call = attention_call(device, shape, torch.bfloat16, 1, length, length)
    pairs = length * (length + 1) / 2
    return timed(f"{model}, prefill {length}", "GFLOP/s", 4.0 * pairs * heads * head_dim, call)


def attention_call(
    device: torch.device,
    shape: tuple[str, int, int, int],
    cache_dtype: torch.dtype,
    batch: int,
    query_len: int,
    length: int,
) -> Callable[[], object]:
    """`batch` rows of `length` tokens, queries in bfloat16, over a pool of their size."""
    _, heads, kv_heads, head_dim = shape
    per_row = -(-length // BLOCK_SIZE)
    sizes = KV_DTYPES[str(cache_dtype).removeprefix("torch.")]
    layout = KVLayout((KVGroup((0,)),), BLOCK_SIZE, kv_heads, head_dim, *sizes)
    pool = KVPool.allocate(layout, batch * per_row, cache_dtype, device)
    layer = pool.layers[0]
    for cache, scales in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        if scales is None:
            cache.normal_()
        else:
            cache.random_(-127, 128)
            scales.uniform_(0.005, 0.01)
    q = torch.randn(batch * query_len, heads, head_dim, device=device).bfloat16()
    order = torch.randperm(batch * per_row, device=device).to(torch.int32)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * query_len
    lens = torch.full((batch,), length, device=device, dtype=torch.int32)
    table = order.view(batch, per_row)
    return lambda: paged_attention(
        q,
        layer.k,
        layer.v,
        table,
        starts,
        lens,
        head_dim**-0.5,
        None,
        layer.k_scale,
        layer.v_scale,
        max_query_len=query_len,
    )


def timed(name: str, unit: str, amount: float, call: Callable[[], object]) -> Figure:
    """`amount` of work of one call, in billions per second."""
    fast, middle, slow = do_bench_cudagraph(call, rep=200, quantiles=[0.0, 0.5, 1.0])
    rates = [amount / milliseconds / 1e6 for milliseconds in (middle, slow, fast)]
    return Figure(name, unit, *rates)


if __name__ == "__main__":
    main()
