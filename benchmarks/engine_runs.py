"""What the benchmarks that compare engines share: which engines run, the machine's limits measured
between their turns, and the record of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engines import ENGINES, Engine, EngineOptions, UnavailableError, open_engine

from quire.bench.machine import (
    Limits,
    current_commit,
    describe_machine,
    measure_limits,
    measure_low_precision_limits,
)
from quire.bench.record import BenchRecord, Spread, spread_of

__all__ = ["LimitTurns", "Run", "add_engine_arguments", "opened_engines", "record_of"]

BENCHMARKS = Path(__file__).parent
MODEL = BENCHMARKS / "models" / "qwen3-0.6b"


@dataclass(frozen=True, slots=True)
class Run:
    """An engine that is loaded. name, weights: as on the command line. bits: of a weight."""

    name: str
    weights: str
    bits: int
    engine: Engine


@dataclass(slots=True)
class LimitTurns:
    """The machine's limits, measured once per turn, so that they meet the same machine as the
    figures between them."""

    num_threads: int
    turns: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def measure(self) -> None:
        found = {
            **asdict(measure_limits(self.num_threads)),
            **asdict(measure_low_precision_limits(self.num_threads)),
        }
        for name, value in found.items():
            self.turns.setdefault(name, []).append(value)

    def reads(self) -> list[float]:
        """Bytes per second, by turn."""
        return [value * 1e9 for value in self.turns["read_gb_per_s"]]

    def arithmetic(self, bits: int) -> list[float]:
        """Operations per second, by turn, of the fastest product that weights of so many bits
        allow: int8 below 16 bits; at 16 bits bfloat16 or float32, whichever is faster here."""
        if bits < 16:
            return [value * 1e9 for value in self.turns["int8_gop_per_s"]]
        pairs = zip(self.turns["matmul_gflop_per_s"], self.turns["bf16_gflop_per_s"], strict=True)
        return [max(pair) * 1e9 for pair in pairs]

    def summary(self) -> Limits:
        """Medians."""
        return Limits(
            read_gb_per_s=spread_of(self.turns["read_gb_per_s"]).median,
            matmul_gflop_per_s=spread_of(self.turns["matmul_gflop_per_s"]).median,
            num_threads=self.num_threads,
        )

    def figures(self) -> dict[str, Spread]:
        """As figures of the record."""
        return {
            f"limit_{name}": spread_of(values)
            for name, values in self.turns.items()
            if name != "num_threads"
        }


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Which engines, how often, where to."""
    formats = "; ".join(f"{name}: {', '.join(a.bits)}" for name, a in ENGINES.items())
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=["quire"], help="in this order (quire)"
    )
    parser.add_argument("--weights", nargs="+", help=f"formats; all of them if unset. {formats}")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="keeps converted models; temporary if unset")
    parser.add_argument("--output-folder", type=Path, help="one JSON file per engine and format")


def opened_engines(
    options: argparse.Namespace, work_dir: Path, *, max_num_seqs: int, max_model_len: int
) -> Iterator[Run]:
    """Each engine and format in turn, loaded, and closed afterwards. What cannot run here is
    skipped with one line."""
    for name in options.engine:
        for weights, bits in ENGINES[name].bits.items():
            if options.weights and weights not in options.weights:
                continue
            wanted = EngineOptions(
                model=options.model,
                weights=weights,
                num_threads=options.threads,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                work_dir=work_dir,
                seed=options.seed,
            )
            try:
                engine = open_engine(name, wanted)
            except UnavailableError as reason:
                line = f"{ENGINES[name].title}, {weights}: skipped, {reason}"
                print(" ".join(line.split()), file=sys.stderr, flush=True)
                continue
            try:
                yield Run(name, weights, bits, engine)
            finally:
                engine.close()


def record_of(
    benchmark: str,
    run: Run,
    limits: LimitTurns,
    seed: int,
    workload: dict[str, Any],
    figures: dict[str, Sequence[float]],
) -> BenchRecord:
    """The figures of one engine and format, by turn, with the limits of the same turns."""
    return BenchRecord(
        benchmark=benchmark,
        command=("python", *map(_without_folders, sys.argv)),
        commit=current_commit(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(),
        limits=limits.summary(),
        seed=seed,
        settings=run.engine.settings,
        workload={"engine": run.name, "weights": run.weights, "bits": run.bits, **workload},
        figures={
            **{name: spread_of(values) for name, values in figures.items()},
            **limits.figures(),
        },
    )


def _without_folders(argument: str) -> str:
    """An absolute path is of this machine alone: its last name is enough."""
    return Path(argument).name if Path(argument).is_absolute() else argument
