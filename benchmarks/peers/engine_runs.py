"""Shared parts of the benchmarks that compare engines: the engines that run, their groups, and the
record of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.config import env

_BEFORE = set(os.environ)
env.limit_spinning()  # before torch starts its threads: they must not spin beside an engine's turn
OWN_VARIABLES = set(os.environ) - _BEFORE
"""Set for this process alone; engines wait as their users would have them wait."""

from benchmarks.arguments import command_line, positive_number  # noqa: E402
from benchmarks.peers.engines import ENGINES, EngineOptions, Format, UnavailableError  # noqa: E402
from benchmarks.peers.engines.process import EngineProcess  # noqa: E402

from quire.entrypoints.bench.machine import Limits, current_commit, describe_machine  # noqa: E402
from quire.entrypoints.bench.record import BenchRecord, spread_of  # noqa: E402

__all__ = [
    "BENCHMARKS",
    "Group",
    "Run",
    "add_engine_arguments",
    "hold_to_isa",
    "opened_groups",
    "record_of",
]

BENCHMARKS = Path(__file__).parents[1]
MODEL = BENCHMARKS / "models" / "qwen3-0.6b"
ISAS: Mapping[str, str] = {
    "avx2": "AVX2",
    "avx512": "AVX512_CORE",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512_bf16": "AVX512_CORE_BF16",
}
"""Instruction sets of quire, and the same for oneDNN, which computes for OpenVINO and torch."""
WITHOUT_BF16 = ("avx2", "avx512", "avx512_vnni")


@dataclass(frozen=True, slots=True)
class Run:
    """An engine that is loaded. name, weights: same as on the command line."""

    name: str
    weights: str
    form: Format
    engine: EngineProcess

    @property
    def title(self) -> str:
        return title_of(self.name, self.weights)


@dataclass(frozen=True, slots=True)
class Group:
    """Engines that take turns, with weights of `bits` bits. started: time in the records
    of its engines, which with `bits` tells groups apart."""

    bits: int
    started: str
    runs: tuple[Run, ...]


def title_of(name: str, weights: str) -> str:
    return f"{ENGINES[name].title}, {weights}"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the engines, the number of repeats, and the output."""
    formats = "; ".join(f"{name}: {', '.join(a.formats)}" for name, a in ENGINES.items())
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=["quire"], help="in this order (quire)"
    )
    parser.add_argument("--weights", nargs="+", help=f"formats; all of them if unset. {formats}")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=_named_interpreter,
        metavar="ENGINE=PATH",
        help="interpreter of an engine's own environment; this one if unset",
    )
    parser.add_argument(
        "--isa",
        choices=ISAS,
        help="engines and limits use no wider instructions than these; others are left out",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=positive_number, default=os.cpu_count() or 1)
    parser.add_argument(
        "--repeats", type=positive_number, default=6, help="turns of every engine (6)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="keeps converted models; temporary if unset")
    parser.add_argument("--output-folder", type=Path, help="one JSON file per engine and format")


def hold_to_isa(isa: str | None) -> None:
    """Hold this process and those it starts to an instruction set. Before torch's first product."""
    if isa is not None:
        os.environ |= {"QUIRE_CPU_ISA": isa, "ONEDNN_MAX_CPU_ISA": ISAS[isa]}


def _named_interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in ENGINES or not path:
        raise argparse.ArgumentTypeError(
            f"{text}: not ENGINE=PATH with one of {', '.join(ENGINES)}"
        )
    return name, path


def opened_groups(
    options: argparse.Namespace, work_dir: Path, *, max_num_seqs: int, max_model_len: int
) -> Iterator[Group]:
    """One group after another, its engines loaded, and closed afterwards. What cannot run here is
    skipped with one line. Raises EngineEndedError; SystemExit for a format that no engine has."""
    known = {weights for name in options.engine for weights in ENGINES[name].formats}
    if unknown := sorted(set(options.weights or ()) - known):
        raise SystemExit(
            f"--weights: {', '.join(unknown)} is no format of {', '.join(options.engine)}; "
            f"there are {', '.join(sorted(known))}."
        )
    wanted = [
        (form, name, weights)
        for name in options.engine
        for weights, form in ENGINES[name].formats.items()
        if not options.weights or weights in options.weights
    ]
    wanted.sort(
        key=lambda one: -one[0].bits
    )  # stable: engines stay in the order of the command line
    pythons = dict(options.python)
    for bits, members in groupby(wanted, key=lambda one: one[0].bits):
        with ExitStack() as stack:
            runs: list[Run] = []
            for form, name, weights in members:
                title = title_of(name, weights)
                wanted_engine = EngineOptions(
                    model=options.model,
                    weights=weights,
                    num_threads=options.threads,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    work_dir=work_dir,
                    seed=options.seed,
                    widen_16_bits=options.isa in WITHOUT_BF16,
                )
                module, python = ENGINES[name].module, pythons.get(name, sys.executable)
                try:
                    if options.isa and not ENGINES[name].restrictable:
                        raise UnavailableError("it cannot be held to an instruction set")
                    engine = EngineProcess(title, module, wanted_engine, python, _environment())
                except UnavailableError as reason:
                    line = f"{title}: skipped, {reason}"
                    print(" ".join(line.split()), file=sys.stderr, flush=True)
                    continue
                stack.callback(engine.close)
                runs.append(Run(name, weights, form, engine))
            if runs:
                yield Group(bits, _now(), tuple(runs))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}


def record_of(
    benchmark: str,
    group: Group,
    run: Run,
    limits: Limits,
    seed: int,
    workload: dict[str, Any],
    figures: dict[str, Sequence[float]],
) -> BenchRecord:
    """The figures of one engine and format, by turn."""
    place = {"engine": run.name, "weights": run.weights, **asdict(run.form)}
    turns = {"group": group.started, "members": [one.title for one in group.runs]}
    return BenchRecord(
        benchmark=benchmark,
        command=tuple(map(_without_folders, command_line())),
        commit=current_commit(),
        time=_now(),
        machine=describe_machine(),
        limits=limits,
        seed=seed,
        settings=run.engine.settings,
        workload={**place, "turns": turns, **workload},
        figures={name: spread_of(values) for name, values in figures.items()},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _without_folders(argument: str) -> str:
    """An absolute path is of this machine alone: its last name is enough."""
    start, equals, path = argument.rpartition("=")
    return start + equals + Path(path).name if Path(path).is_absolute() else argument
