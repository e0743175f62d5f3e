"""Shared parts of the kernel benchmarks: rates measured by turns, the machine's limits, the
record."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.config import env

env.limit_spinning()  # as the engine does, before torch starts its threads

import torch  # noqa: E402
from benchmarks.arguments import command_line, positive_number  # noqa: E402

from quire.entrypoints.bench.machine import current_commit, describe_machine  # noqa: E402

SEED = 0
REPEAT_SECONDS = 0.05

Call = tuple[str, str, float, Callable[[], object]]
"""Name, unit, amount of work of one call, and the call."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: median, lowest and highest over the repeats, in `unit`."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    repeats: int


def figures_by_turns(calls: Sequence[Call], repeats: int) -> Iterator[Figure]:
    """Billions of work per second. Each call takes its turn in every repeat, so that all meet the
    same machine; one untimed round before."""
    rates: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for (_, _, amount, call), values in zip(calls, rates, strict=True):
            value = _rate(amount, call)
            if repeat:
                values.append(value)
    for (name, unit, _, _), values in zip(calls, rates, strict=True):
        yield Figure(name, unit, statistics.median(values), min(values), max(values), len(values))


def _rate(amount: float, call: Callable[[], object]) -> float:
    """`amount` per second of `call`, in billions, over at least REPEAT_SECONDS."""
    rounds, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < REPEAT_SECONDS or not rounds:
        call()
        rounds += 1
    return amount * rounds / elapsed / 1e9


def blocks_read(
    caches: Sequence[torch.Tensor], block_table: torch.Tensor, tokens: int
) -> Callable[[], None]:
    """Sums over the first `tokens` of all rows of each K or V [B, S, K, D], block after block as
    attention reads them, scales too."""
    rows, block_size = block_table.shape[0], caches[0].shape[1]
    blocks = block_table[:, : tokens // block_size, None].long()
    wanted = (blocks * block_size + torch.arange(block_size)).flatten()
    starts = torch.arange(0, wanted.numel(), tokens // 2)  # pieces enough for all threads
    assert starts.numel() == 2 * rows

    def floats(cache: torch.Tensor) -> torch.Tensor:
        """The pages as [tokens, floats]."""
        storage = torch.empty(0, dtype=torch.float32).set_(cache.untyped_storage())
        width = cache.stride(1) * cache.itemsize // storage.itemsize
        start = cache.storage_offset() * cache.itemsize // storage.itemsize
        count = cache.shape[0] * block_size
        return storage.as_strided((count, width), (width, 1), start)

    pages = [floats(cache) for cache in caches]

    def read() -> None:
        for page in pages:
            torch.nn.functional.embedding_bag(wanted, page, starts, mode="sum")

    return read


def _machine_limits(repeats: int) -> Iterator[Figure]:
    """A sum over 1 GiB, and 2048³ products: the bandwidth and arithmetic that can be had here."""
    data = torch.ones(2**28)
    calls: list[Call] = [("memory read", "GB/s", float(data.nbytes), data.sum)]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, 2048, 2048).to(dtype)
        calls.append(
            (f"matmul {dtype}", "GFLOP/s", 2.0 * 2048**3, lambda a=a, b=b: torch.matmul(a, b))
        )
    yield from figures_by_turns(calls, repeats)


def run(
    benchmark: str,
    about: str | None,
    figures: Callable[[argparse.Namespace], Iterable[Figure]],
    *,
    has_quick: bool = True,
) -> None:
    """Parse the command line, measure the limits and `figures(options)`, print, and record. about:
    for --help. has_quick: whether there is a short form, options.quick."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write JSON here")
    parser.add_argument(
        "--threads", type=positive_number, metavar="N", help="torch's own number when not given"
    )
    parser.add_argument(
        "--repeats", type=positive_number, default=5, metavar="N",
        help="turns of every figure, after one that does not count (default: %(default)s)",
    )  # fmt: skip
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="fewer shapes")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    load_before, commit = os.getloadavg(), current_commit()
    found: list[Figure] = []
    with torch.inference_mode():
        for source in (_machine_limits(options.repeats), figures(options)):
            for figure in source:
                found.append(figure)
                print(
                    f"{figure.name:50s} {figure.median:8.1f} {figure.unit:8s}"
                    f" ({figure.low:.1f} to {figure.high:.1f})",
                    flush=True,
                )
    if options.output:
        report = {
            "benchmark": benchmark,
            "command": " ".join(command_line()),
            "commit": commit,
            "seed": SEED,
            "machine": asdict(describe_machine()),
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "figures": [asdict(figure) for figure in found],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
