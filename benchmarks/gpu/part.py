"""Inputs of a part of the run, and the record of its findings."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

__all__ = ["Part", "machine_facts"]

SHOWN_FAILURE = 1000
"""Characters of what went wrong; a compiler may say pages."""


@dataclass(frozen=True, slots=True)
class Part:
    """device: cuda, or cpu for a dry run. quick: fewer shapes. findings: a file of one JSON object
    per line, so that what was found before a part broke is not lost."""

    device: torch.device
    quick: bool
    seed: int
    findings: Path

    @property
    def is_dry(self) -> bool:
        """Return whether nothing is meant to be fast: sizes are tiny, and figures say nothing."""
        return self.device.type == "cpu"

    def figure(
        self, name: str, unit: str, values: Sequence[float], goal: float | None = None
    ) -> None:
        """Print and keep the median of `values` with its spread. A dry run has no goals."""
        goal = None if self.is_dry else goal
        middle, low, high = statistics.median(values), min(values), max(values)
        aim = "" if goal is None else f", goal {goal:,.0f}"
        print(f"{name:64s} {middle:12,.1f} {unit} ({low:,.1f} to {high:,.1f}{aim})", flush=True)
        self._keep(
            kind="figure", name=name, unit=unit, median=middle, low=low, high=high, goal=goal
        )

    def rate(self, name: str, unit: str, amount: float, seconds: Sequence[float]) -> None:
        """`amount` of work per second, in billions of `unit`."""
        self.figure(name, unit, [amount / each / 1e9 for each in seconds])

    def check(self, name: str, failures: Sequence[str], detail: str = "") -> None:
        """Print and keep whether something held; each failure is a sentence."""
        verdict = f"{len(failures)} WRONG" if failures else "ok"
        print(f"{name:64s} {verdict} {detail}", flush=True)
        for failure in failures[:3]:
            print(f"  {failure[:SHOWN_FAILURE]}", flush=True)
        told = [failure[:SHOWN_FAILURE] for failure in failures[:20]]
        self._keep(kind="check", name=name, ok=not failures, detail=detail, failures=told)

    def note(self, name: str, value: Any) -> None:
        """Keep what is neither."""
        print(f"{name:64s} {value}", flush=True)
        self._keep(kind="note", name=name, value=value)

    def keep_facts(self, facts: dict[str, Any]) -> None:
        """Keep facts of the machine."""
        self._keep(kind="facts", facts=facts)

    def _keep(self, **finding: Any) -> None:
        line = json.dumps(finding) + "\n"
        with self.findings.open("ab", buffering=0) as file:  # whole: other processes write here too
            file.write(line.encode())

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def seconds_of(self, call: Callable[[], object], milliseconds: int = 100) -> list[float]:
        """Time one call: median, fastest and slowest of a few replays of a CUDA graph, so that no
        launch is in it; on a CPU of two calls."""
        if self.is_dry:
            started = [time.perf_counter()]
            for _ in range(2):
                call()
                started.append(time.perf_counter())
            return [max(end - begin, 1e-9) for begin, end in pairwise(started)]
        from triton.testing import do_bench_cudagraph

        self.synchronize()  # the first call is on another stream than what made its arguments
        fast, middle, slow = do_bench_cudagraph(call, rep=milliseconds, quantiles=[0.0, 0.5, 1.0])
        return [middle / 1e3, fast / 1e3, slow / 1e3]


def machine_facts() -> dict[str, Any]:
    """Return facts of this process: the GPU if there is one, and the versions that matter."""
    from importlib.metadata import PackageNotFoundError, version

    from quire.entrypoints.bench.machine import describe_machine

    facts: dict[str, Any] = {"machine": asdict(describe_machine())}
    for package in ("triton", "flashinfer-python", "flash-attn-3"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(0)),
            "toolkit": torch.version.cuda or torch.version.hip,
        }
    return facts
