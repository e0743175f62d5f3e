"""Cost of the flight recorder: microseconds that it adds to a steady decode step, and bytes.

    python -m benchmarks.scheduling.flight_recorder [--repeats 2000]
        [--output benchmarks/results/flight_recorder.json]

Two schedulers do the same steps by turns, one of them without its recorder. A step is what the core
does on its own side: plan, apply, and the notes of its waits. No model runs. The cost is the
difference of the tenth percentiles, since other programs may disturb more than half of the steps;
its share is that of a step of 5 ms. Also measured: a copy of the ring, and a dump of this process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line, positive_number
from benchmarks.scheduling.scheduler import (
    SEED,
    Timing,
    drain_prompts,
    make_request,
    make_scheduler,
)

from quire.base.telemetry.flight.dump import collect, encode_dump
from quire.base.telemetry.flight.record import STEP_BYTES, Doing
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.plan.scheduler import Scheduler
from quire.protocol import StepResult

NUM_ROUNDS = 5
STEP_US = 5000.0
DEFAULT_OUT = Path(__file__).parents[1] / "results" / "flight_recorder.json"


def decoding(num_seqs: int, *, is_recorded: bool) -> Scheduler:
    """Return a scheduler of sequences that all decode. It notes its steps, or not."""
    rng = np.random.default_rng(SEED)
    scheduler = make_scheduler(num_seqs, num_blocks=num_seqs * 200)
    for handle in range(num_seqs):
        prompt = rng.integers(3, 30000, int(rng.integers(65, 321)))
        scheduler.add(make_request(handle, prompt, max_tokens=2800))
    drain_prompts(scheduler, num_seqs)
    if not is_recorded:
        scheduler._log.note = lambda *_, **_named: None  # type: ignore[method-assign]  # noqa: SLF001
    return scheduler


def step(scheduler: Scheduler, tokens: np.ndarray, *, is_recorded: bool) -> int:
    """Do one step as the core does. Return nanoseconds."""
    flight = scheduler.flight
    slots = np.arange(len(tokens), dtype=np.int32)
    start = time.perf_counter_ns()
    begin = flight.enter(Doing.PLANNING) if is_recorded else 0
    plan = scheduler.plan(0.0)
    assert plan is not None
    if is_recorded:
        flight.given(begin, flight.enter(Doing.GIVING))
        flight.waited(flight.enter(Doing.AWAITING_RESULT))
    scheduler.apply(StepResult(plan.step_id, slots, tokens))
    if is_recorded:
        flight.applied()
    return time.perf_counter_ns() - start


def one_round(num_seqs: int, repeats: int) -> dict[bool, list[int]]:
    schedulers = {each: decoding(num_seqs, is_recorded=each) for each in (True, False)}
    rng = np.random.default_rng(SEED)
    times: dict[bool, list[int]] = {True: [], False: []}
    for repeat in range(repeats):
        tokens = rng.integers(3, 30000, num_seqs).astype(np.int32)
        for is_recorded in (True, False) if repeat % 2 else (False, True):
            scheduler = schedulers[is_recorded]
            times[is_recorded].append(step(scheduler, tokens, is_recorded=is_recorded))
    return times


def tenth(times: list[int]) -> float:
    return statistics.quantiles(times, n=10)[0]


def cost(num_seqs: int, repeats: int) -> dict[str, object]:
    rounds = [one_round(num_seqs, repeats // NUM_ROUNDS) for _ in range(NUM_ROUNDS)]
    added = [(tenth(times[True]) - tenth(times[False])) / 1000 for times in rounds]
    median = statistics.median(added)
    return {
        "sequences": num_seqs,
        "added_us": round(median, 2),
        "added_us_of_rounds": [round(each, 2) for each in added],
        "share_of_5_ms": round(median / STEP_US, 5),
        "with_recorder": Timing.of([t for times in rounds for t in times[True]]).to_json(),
        "without": Timing.of([t for times in rounds for t in times[False]]).to_json(),
    }


def dumping(repeats: int) -> dict[str, object]:
    scheduler = decoding(64, is_recorded=True)
    tokens = np.full(64, 3, np.int32)
    for _ in range(2500):  # so that the ring is full
        step(scheduler, tokens, is_recorded=True)
    copies: list[int] = []
    dumps: list[int] = []
    data = ring = b""
    for _ in range(repeats):
        start = time.perf_counter_ns()
        ring = scheduler.flight.snapshot()
        copied = time.perf_counter_ns()
        data = encode_dump(collect("benchmark", "benchmark", rings=[ring]))
        copies.append(copied - start)
        dumps.append(time.perf_counter_ns() - copied)
    return {
        "copy": Timing.of(copies).to_json(),
        "dump": Timing.of(dumps).to_json(),
        "ring_bytes": len(ring),
        "dump_bytes": len(data),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive_number, default=2000)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUT)
    options = parser.parse_args()
    report = {
        "command": command_line(),
        "commit": current_commit(),
        "machine": asdict(describe_machine()),
        "seed": SEED,
        "bytes_per_step": STEP_BYTES,
        "steps": [cost(num_seqs, options.repeats) for num_seqs in (1, 8, 64, 256)],
        "dump": dumping(20),
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for each in report["steps"]:
        print(each)
    print(report["dump"])


if __name__ == "__main__":
    main()
