"""Kill, or stop, the engine core at random points under load, many times: the number of streams
that end exactly once with the tokens of an undisturbed engine, and how long it takes to be ready
again.

    python -m benchmarks.serving.core_faults --runs 200 --output benchmarks/results/core_faults.json

The core is a real process with the real scheduler, over the fake executor of the tests, whose
tokens are known in advance. It talks to nobody but this process, and only processes that were
started here are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.arguments import command_line
from tests.engine.fake_core_process import FakeCoreOptions
from tests.engine.process_harness import (
    FAKE_MODEL,
    Collected,
    ask,
    collect,
    hosted,
    until_idle,
    until_state,
)

from quire.engine.supervision.host import EngineHost
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.protocol.status import EngineState

STREAMS = 12
LONGEST = 60
LIMIT_S = 60.0
"""A stream that has not ended by then has no ending."""


async def _one_run(host: EngineHost, rng: random.Random, fault: signal.Signals) -> dict[str, float]:
    wanted: list[dict[int, list[int]]] = []
    tasks: list[asyncio.Task[Collected]] = []
    for i in range(STREAMS):
        prompt = [i, *range(rng.randrange(1, 30))]
        n, length = rng.choice((1, 1, 2)), rng.randrange(1, LONGEST)
        stream = await ask(host.client, prompt, seed=i, n=n, max_tokens=length)
        tasks.append(asyncio.ensure_future(collect(stream)))
        wanted.append({s: FAKE_MODEL.expected_tokens(prompt, length, i, s) for s in range(n)})
    await asyncio.sleep(rng.uniform(0.0, 0.2))
    began = time.monotonic()
    pid = host.supervisor.pid
    assert pid is not None, "a ready engine has a core"
    os.kill(pid, fault)
    await until_state(host.client, EngineState.RESTARTING)
    noticed = time.monotonic()
    await until_state(host.client, EngineState.READY)
    ready = time.monotonic()
    _, unended = await asyncio.wait(tasks, timeout=LIMIT_S)
    ended = [(task, tokens) for task, tokens in zip(tasks, wanted, strict=True) if task.done()]
    outcomes = Counter(
        finish.reason.value for task, _ in ended for finish in task.result().finishes.values()
    )
    await until_idle(host.client)  # blocks that leaked would keep it from that
    return {
        "notice_s": noticed - began,
        "recovery_s": ready - began,
        "without_end": len(unended),
        "failed": outcomes["error"],
        "different": sum(task.result().tokens != tokens for task, tokens in ended),
        "streams": len(tasks),
    }


async def _measure(runs: int, seed: int, fault: signal.Signals) -> list[dict[str, float]]:
    rng = random.Random(seed)
    results: list[dict[str, float]] = []
    options = FakeCoreOptions(step_s=0.003)
    async with hosted(options, stall_s=1.0, silence_s=0.5) as host:
        for run in range(runs):
            results.append(await _one_run(host, rng, fault))
            print(f"{fault.name} {run + 1}/{runs}: {results[-1]}", file=sys.stderr)
    return results


def _summary(results: list[dict[str, float]]) -> dict[str, float]:
    totals = {
        name: sum(result[name] for result in results)
        for name in ("streams", "without_end", "failed", "different")
    }
    times = {
        f"{name}_{label}": value
        for name in ("notice_s", "recovery_s")
        for label, value in (
            ("median", statistics.median(result[name] for result in results)),
            ("max", max(result[name] for result in results)),
        )
    }
    return {"runs": len(results), **totals, **times}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="cores to kill (200)")
    parser.add_argument("--stops", type=int, default=10, help="cores to stop with SIGSTOP (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    found = {
        fault.name: _summary(asyncio.run(_measure(runs, arguments.seed, fault)))
        for fault, runs in ((signal.SIGKILL, arguments.runs), (signal.SIGSTOP, arguments.stops))
        if runs
    }
    print(json.dumps(found, indent=2))
    if arguments.output is not None:
        report = {
            "benchmark": "core_faults",
            "command": " ".join(command_line()),
            "commit": current_commit(),
            "seed": arguments.seed,
            "machine": dataclasses.asdict(describe_machine()),
            "figures": found,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    bad = sum(f["without_end"] + f["failed"] + f["different"] for f in found.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
