"""Clients that leave, dawdle or come in masses, and shutdowns under load, over real HTTP on
loopback. The record says what a server holds on to, whom it tells the wrong thing, and how much it
still serves.

    python -m benchmarks.serving.server_faults --output benchmarks/results/server_faults.json

The front is the real one, in a process of its own, with a supervised core process under it that has
the real scheduler over the fake executor. Only processes that were started here are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line
from tests.engine.fake_core_process import FakeCoreOptions
from tests.server.fake_serve import FakeServeOptions, FakeServer, fake_server
from tests.server.load import (
    Figures,
    abort_storm,
    overload,
    shutdown_under_load,
    slow_readers,
    until_ready,
)

from quire.entrypoints.bench.machine import current_commit, describe_machine

LIMIT_S = 600.0
Scenario = Callable[[FakeServer], Coroutine[Any, Any, Figures]]


def _with_server(options: FakeServeOptions, scenario: Scenario) -> Figures:
    async def run(server: FakeServer) -> Figures:
        await until_ready(server.port)
        async with asyncio.timeout(LIMIT_S):
            return await scenario(server)

    with fake_server(options) as server:
        return asyncio.run(run(server))


def _core(**options: Any) -> FakeCoreOptions:
    return FakeCoreOptions(**{"num_blocks": 4096, "max_model_len": 512, **options})


def aborts(arguments: argparse.Namespace) -> Figures:
    options = FakeServeOptions(_core(step_s=0.001, max_num_seqs=64, max_num_batched_tokens=1024))
    return _with_server(options, lambda s: abort_storm(s, arguments.aborts, 64, arguments.seed))


def overloads(arguments: argparse.Namespace) -> Figures:
    options = FakeServeOptions(_core(step_s=0.02, max_num_seqs=16, max_num_batched_tokens=512))
    seconds = arguments.overload_s
    return _with_server(options, lambda s: overload(s, 10.0, seconds, 48))


def shutdowns(arguments: argparse.Namespace) -> Figures:
    """Half of them to the whole process group, half with too little time to drain."""
    rng = random.Random(arguments.seed)
    total: Figures = {}
    for run in range(arguments.shutdowns):
        limit, delay = (30.0, 0.3)[run // 2 % 2], rng.uniform(0.0, 0.5)
        options = FakeServeOptions(_core(step_s=0.01), shutdown_timeout=limit)
        found = _with_server(
            options,
            lambda s, d=delay, g=bool(run % 2): shutdown_under_load(s, 48, d, to_group=g),
        )
        print(f"shutdown {run + 1}/{arguments.shutdowns}: {found}", file=sys.stderr)
        slowest = max(total.get("slowest_exit_s", 0.0), found.pop("exit_s"))
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + abs(value)
        total["slowest_exit_s"] = slowest
    return {"runs": arguments.shutdowns, **total}


def slow(arguments: argparse.Namespace) -> Figures:
    core = _core(
        step_s=0.005, num_blocks=20_000, block_size=16, max_num_seqs=96,
        max_num_batched_tokens=1024, max_model_len=4096,
    )  # fmt: skip
    seconds = arguments.slow_s
    return _with_server(FakeServeOptions(core), lambda s: slow_readers(s, 64, 4000, seconds))


SCENARIOS = {"aborts": aborts, "overload": overloads, "shutdowns": shutdowns, "slow_readers": slow}


def faults_of(found: dict[str, Figures]) -> list[str]:
    """List what is not as it must be."""
    must_be_zero = (
        "wrong", "broken", "open_requests", "waiting_requests", "running", "used_blocks_share",
        "rejected_without_retry_after", "other_outcomes", "exit_status", "left_processes",
        "left_files", "left_port",
    )  # fmt: skip
    faults = [
        f"{scenario}: {name} is {figures[name]}"
        for scenario, figures in found.items()
        for name in must_be_zero
        if figures.get(name)
    ]
    load = found.get("overload")
    if load and not (load["goodput_share"] >= 0.9 and load["reject_p99_ms"] <= 50):
        faults.append(f"overload: {load}")
    return faults


def _record(
    arguments: argparse.Namespace, name: str, figures: Figures, load_before: tuple[float, ...]
) -> None:
    """Put one scenario into the file; the others stay, each with the commit that it is of."""
    path: Path = arguments.output
    found = json.loads(path.read_text())["scenarios"] if path.exists() else {}
    found[name] = {
        "commit": current_commit(),
        "command": " ".join(command_line()),
        "seed": arguments.seed,
        "machine": dataclasses.asdict(describe_machine()),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "figures": figures,
    }
    report = {"benchmark": "server_faults", "scenarios": found}
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCENARIOS, nargs="+", default=list(SCENARIOS))
    parser.add_argument("--aborts", type=int, default=10_000, help="requests of the storm (10,000)")
    parser.add_argument("--overload-s", type=float, default=10.0, help="seconds at each rate (10)")
    parser.add_argument("--shutdowns", type=int, default=20, help="servers to end under load (20)")
    parser.add_argument("--slow-s", type=float, default=10.0, help="seconds of slow reading (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    found: dict[str, Figures] = {}
    for name in arguments.only:
        load_before = os.getloadavg()
        found[name] = SCENARIOS[name](arguments)
        print(json.dumps({name: found[name]}, indent=2), flush=True)
        if arguments.output is not None:
            _record(arguments, name, found[name], load_before)
    faults = faults_of(found)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
