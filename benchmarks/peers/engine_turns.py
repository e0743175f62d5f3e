"""Engines by turns, with the machine's limits measured between every two turns.

The machine's memory may change its speed within seconds. So all engines of a group are open at
once and run the same requests one after another, in the reverse order in every second repeat, and
what is compared are figures of the same turn: limit, A, limit, B, limit, next column, …
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.peers.engine_runs import Run
from benchmarks.peers.engines import Timeline
from benchmarks.peers.engines.process import EngineRun

from quire.entrypoints.bench.lengths import Workload, random_prompts
from quire.entrypoints.bench.machine import LimitProbe, Limits, Product
from quire.entrypoints.bench.record import spread_of

__all__ = ["MachineLimits", "Reading", "Turn", "run_turns", "warm_up"]

FIGURES: Mapping[Product, str] = {
    "fp32": "matmul_gflop_per_s",
    "bf16": "bf16_gflop_per_s",
    "int8": "int8_gop_per_s",
}
"""Names of the limits in records."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Abilities of the machine at one moment: bytes, and operations of the group's product, per
    second."""

    read: float
    arithmetic: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of requests, and the limits right before and right after it.

    The limit that a share is of is the mean of the two: the run lies between both, and in a machine
    that drifts neither speaks for it alone. The larger one would be that of the better moment,
    at which the engine was not running, and so every share too small.
    """

    run: EngineRun
    before: Reading
    after: Reading

    @property
    def timeline(self) -> Timeline:
        return self.run.timeline

    @property
    def read(self) -> float:
        return (self.before.read + self.after.read) / 2

    @property
    def arithmetic(self) -> float:
        return (self.before.arithmetic + self.after.arithmetic) / 2


class MachineLimits:
    """The machine's limits for weights of some bits: the read, and the fastest product that they
    allow: int8 below 16 bits; at 16 bits bfloat16 or float32, whichever is faster here. All
    products are measured once at the start, that one in every reading."""

    def __init__(self, probe: LimitProbe, bits: int) -> None:
        self._probe = probe
        self._products = {kind: probe.product(kind) for kind in FIGURES}
        wide: Product = "bf16" if self._products["bf16"] > self._products["fp32"] else "fp32"
        self._kind: Product = "int8" if bits < 16 else wide

    def reading(self) -> Reading:
        """Takes a quarter of a second. The median of its reads: shared memory changes its speed
        within tenths of a second, and the best read would be that of the better moment, while a
        run has its share of both."""
        read = self._probe.read(choose=statistics.median)
        return Reading(read * 1e9, self._probe.product(self._kind) * 1e9)

    def figures(self, turns: Sequence[Turn]) -> dict[str, list[float]]:
        """For the record, around these turns."""
        found = {f"limit_{FIGURES[kind]}": [value] for kind, value in self._products.items()}
        found[f"limit_{FIGURES[self._kind]}"] = [turn.arithmetic / 1e9 for turn in turns]
        return {"limit_read_gb_per_s": [turn.read / 1e9 for turn in turns], **found}

    def summary(self, turns: Sequence[Turn]) -> Limits:
        """Medians around these turns."""
        figures = self.figures(turns)
        return Limits(
            read_gb_per_s=spread_of(figures["limit_read_gb_per_s"]).median,
            matmul_gflop_per_s=spread_of(figures["limit_matmul_gflop_per_s"]).median,
            num_threads=self._probe.num_threads,
        )


def warm_up(runs: Sequence[Run], workloads: Sequence[Workload], vocab_size: int) -> None:
    """Each of these once on every engine, with ids that no turn has."""
    for run in runs:
        for index, work in enumerate(workloads):
            prompts = random_prompts(work.prompt_lengths, vocab_size, index)
            run.engine.run(prompts, work.output_lengths)


def run_turns(
    runs: Sequence[Run],
    workloads: Mapping[str, Workload],
    limits: MachineLimits,
    *,
    repeats: int,
    vocab_size: int,
    seed: int,
) -> dict[tuple[Run, str], list[Turn]]:
    """Turns by engine and name of the workload. Token ids are the same for all engines and fresh in
    every turn: an engine might know a prompt the second time."""
    turns: dict[tuple[Run, str], list[Turn]] = {
        (run, name): [] for run in runs for name in workloads
    }
    seeds = count(seed + len(workloads))  # after those that warmed up
    before = limits.reading()
    for repeat in range(repeats):
        for name, work in workloads.items():
            prompts = random_prompts(work.prompt_lengths, vocab_size, next(seeds))
            for run in reversed(runs) if repeat % 2 else runs:
                done = run.engine.run(prompts, work.output_lengths)
                after = limits.reading()
                turns[run, name].append(Turn(done, before, after))
                before = after
    return turns
