"""Random moves on the plan side until a million steps are planned and applied, with counts of all
events and failures.

    python -m benchmarks.scheduling.soak --steps 1000000 --output benchmarks/results/soak.json

The moves are those of the state machine in tests/scheduler: requests with samples and beams,
prompts in pieces, pins, aborts, lost steps. The real scheduler, with preemption and swapping, plans
over a fake model that reads the KV cache by its contents, and everything that
`tests/scheduler/simulation.py` promises is checked after each step. A walk is named by its seed:
`run_random(seed, MOVES)` repeats one that failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from benchmarks.arguments import command_line
from tests.scheduler.random_moves import run_random

from quire.entrypoints.bench.machine import current_commit, describe_machine

MOVES = 400
"""Moves of a walk; then it drains, and nothing may be left behind."""
BATCH = 20
"""Walks that a process does before it reports."""

Report = tuple[Counter[str], list[str]]


def walk(first_seed: int) -> Report:
    """BATCH walks from `first_seed` on: counts of their events, and a line for each that failed."""
    done: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first_seed, first_seed + BATCH):
        try:
            simulation = run_random(seed, MOVES)
        except Exception as error:  # noqa: BLE001 - every kind of failure is what is looked for
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
            continue
        done.update(simulation.done)
        done.update(walks=1, moves=MOVES, preemptions=simulation.scheduler.stats().preempted_total)
    return done, failures


def soak(steps: int, first_seed: int, processes: int) -> Report:
    """Walk until `steps` are done. Every walk that was begun is counted."""
    done: Counter[str] = Counter()
    failures: list[str] = []
    running: set[Future[Report]] = set()
    with ProcessPoolExecutor(processes) as pool:
        seed, shown = first_seed, time.monotonic()
        while running or done["steps"] < steps:
            while done["steps"] < steps and len(running) < processes:
                running.add(pool.submit(walk, seed))
                seed += BATCH
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                counts, lines = future.result()
                done.update(counts)
                failures += lines
            if time.monotonic() - shown > 60:
                print(f"{done['steps']} steps, {len(failures)} failures", flush=True)
                shown = time.monotonic()
    return done, failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    commit, began = current_commit(), time.monotonic()
    done, failures = soak(arguments.steps, arguments.seed, arguments.processes)
    found = {
        "seconds": round(time.monotonic() - began),
        "done": dict(sorted(done.items())),
        "num_failures": len(failures),
        "failures": failures[:20],
    }
    print(json.dumps(found, indent=1))
    if arguments.output:
        report = {
            "benchmark": "soak",
            "command": " ".join(command_line()),
            "commit": commit,
            "seed": arguments.seed,
            "machine": dataclasses.asdict(describe_machine()),
            **found,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
