"""Linear layers on the CPU: bandwidth at one row, arithmetic at more, beside torch and the limits.

    python benchmarks/linear_cpu.py [--quick] [--threads N] [--output FILE]

Matrices of Qwen3-0.6B with a vocabulary of 32,768, random data. Every matrix exists in several
copies, together larger than the caches, which take turns; a provider and torch's `linear` take
turns too, so that both meet the same machine. Figures are medians over the repeats, with the lowest
and highest. Every provider is compared with the reference before it is timed.
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
from itertools import cycle
from pathlib import Path

import torch

from quire.ops import ALL_OPS, check_provider, select
from quire.platform import Platform, detect_platform

LINEAR = ALL_OPS["linear"]
SHAPES = {
    "qkv": (1024, 4096),
    "gate_up": (1024, 6144),
    "down": (3072, 1024),
    "o": (2048, 1024),
    "head": (1024, 32768),
}
"""Name to inputs and outputs."""
ROWS = (1, 4, 8, 16, 32, 64, 256)
COPIES_BYTES = 160 * 2**20
"""Of all copies of a matrix: several times the last-level cache."""
REPEAT_SECONDS = 0.05
SEED = 0

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: median, lowest and highest over the repeats, in `unit`."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    repeats: int


def rate(amount: float, call: Callable[[], object]) -> float:
    """`amount` per second of `call`, in billions, over at least REPEAT_SECONDS."""
    rounds, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < REPEAT_SECONDS or not rounds:
        call()
        rounds += 1
    return amount * rounds / elapsed / 1e9


def figures_by_turns(
    calls: Sequence[tuple[str, str, float, Callable[[], object]]], repeats: int
) -> Iterator[Figure]:
    """calls: name, unit, amount, what to call. Each once per repeat, after one untimed round."""
    rates: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for (_, _, amount, call), values in zip(calls, rates, strict=True):
            value = rate(amount, call)
            if repeat:
                values.append(value)
    for (name, unit, _, _), values in zip(calls, rates, strict=True):
        median = statistics.median(values)
        yield Figure(name, unit, median, min(values), max(values), repeats)


def machine_limits(repeats: int) -> Iterator[Figure]:
    """A sum over 1 GiB, and 2048³ products: what bandwidth and arithmetic can be had here."""
    data = torch.ones(2**28)
    calls: list[tuple[str, str, float, Callable[[], object]]] = [
        ("memory read", "GB/s", float(data.nbytes), data.sum)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, 2048, 2048).to(dtype)
        product = (f"matmul {dtype}", "GFLOP/s", 2.0 * 2048**3, lambda a=a, b=b: a @ b)
        calls.append(product)
    yield from figures_by_turns(calls, repeats)


def layers(call: Callable[..., Layer], weights: Sequence[torch.Tensor]) -> Callable[..., object]:
    """x → x Wᵀ with the next copy of the weight at every call."""
    turns = cycle([call(weight) for weight in weights])
    return lambda x: next(turns)(x)


def linear_figures(
    platform: Platform, names: Sequence[str], rows: Sequence[int], repeats: int
) -> Iterator[Figure]:
    """Every provider of this machine that equals the reference, and torch, over the shapes."""
    contenders: dict[str, Callable[..., Layer]] = {"torch": LINEAR.reference}
    for provider in LINEAR.providers:
        if provider.unavailable(platform) is None:
            report = check_provider(LINEAR, provider)
            if not report.ok:
                raise SystemExit("\n".join(report.failures))
            contenders[provider.name] = select(LINEAR, platform, provider.name)[1]
    for dtype in (torch.bfloat16, torch.float32):
        for shape in names:
            inputs, outputs = SHAPES[shape]
            size = inputs * outputs * dtype.itemsize
            copies = max(1, min(32, COPIES_BYTES // size))
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
            made = {name: layers(call, weights) for name, call in contenders.items()}
            for count in rows:
                x = torch.randn(count, inputs).to(dtype)
                unit, amount = (
                    ("GB/s", float(size))
                    if count == 1
                    else ("GFLOP/s", 2.0 * count * inputs * outputs)
                )
                calls = [
                    (f"{shape} {dtype} {count} rows {name}", unit, amount, lambda f=f, x=x: f(x))
                    for name, f in made.items()
                ]
                yield from figures_by_turns(calls, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers on the CPU")
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--threads", type=int, help="torch's own number when not given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two shapes and four row counts only")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    platform, load_before = detect_platform(), os.getloadavg()
    names = ("qkv", "down") if options.quick else tuple(SHAPES)
    rows = (1, 4, 16, 64) if options.quick else ROWS
    figures: list[Figure] = []
    with torch.inference_mode():
        for source in (
            machine_limits(options.repeats),
            linear_figures(platform, names, rows, options.repeats),
        ):
            for figure in source:
                figures.append(figure)
                print(
                    f"{figure.name:46s} {figure.median:8.1f} {figure.unit:8s}"
                    f" ({figure.low:.1f} to {figure.high:.1f})",
                    flush=True,
                )
    if options.output:
        report = {
            "benchmark": "linear_cpu",
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
