"""A million simulated steps with a small pool: preemption, swaps, samples, beams and forks.

    python -m benchmarks.scheduling.soak_simulator [--steps 1000000] [--checked 50000] [--seed 0]

The walks are those of tests/simulator, 310 requests each, named by their seeds. First all
invariants are checked after each of `--checked` steps, then after every thousandth of `--steps`.
Both begin with the same seeds, and walks of equal seeds must have equal trace hashes. After a walk
no block may be left in use.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.arguments import command_line
from tests.simulator.systems import COST, crowded_system, crowded_trace

from quire.base.errors import EngineError
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.entrypoints.simulator import serve
from quire.entrypoints.simulator.workloads import engine_requests

BATCH = 10
"""Walks that are begun together; whole batches are counted."""

CHECK_EVERY = 1000
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "soak" / "simulator.json"


@dataclass(frozen=True, slots=True)
class Walk:
    """trace_hash: hash of its steps. failure: "" if nothing was found."""

    seed: int
    counts: Counter[str]
    trace_hash: str = ""
    failure: str = ""


def walk(seed: int, check_every: int) -> Walk:
    """Serve the trace of a seed, with a check after every so many steps and at the end."""
    system, counts = crowded_system(seed), Counter[str](walks=1)

    def check() -> None:
        counts["steps"] += 1
        if counts["steps"] % check_every == 0:
            counts["checks"] += 1
            system.core.check_invariants()

    try:
        serve(system, engine_requests(crowded_trace(seed), COST.spec.vocab_size), check)
        system.core.check_invariants()
        stats = system.scheduler.stats()
        left = stats.num_used_blocks + stats.num_used_host_blocks
        if left:
            raise EngineError(f"{left} blocks are left in use")
    except Exception as error:  # noqa: BLE001 - every kind of failure is what is looked for
        return Walk(seed, counts, failure=f"seed {seed}: {type(error).__name__}: {error}")
    counts["checks"] += 1
    counts["preempted"] += stats.preempted_total
    counts["swapped_out"] += stats.swapped_out_total
    counts["swapped_in"] += stats.swapped_in_total
    return Walk(seed, counts, system.executor.trace_hash())


def batches(
    pool: ProcessPoolExecutor, first_seed: int, steps: int, check_every: int
) -> Iterator[list[Walk]]:
    """All walks so far, batch after batch, until these have so many steps or a batch has failed."""
    found: list[Walk] = []
    seed = first_seed
    while sum(each.counts["steps"] for each in found) < steps:
        seeds = range(seed, seed + BATCH)
        batch = list(pool.map(partial(walk, check_every=check_every), seeds))
        found += batch
        yield found
        if all(each.failure for each in batch):
            return
        seed += BATCH


def describe(found: list[Walk], check_every: int) -> dict[str, object]:
    """For the record."""
    counts, digest = Counter[str](), hashlib.blake2b(digest_size=16)
    for each in found:
        counts.update(each.counts)
        digest.update(each.trace_hash.encode())
    return {
        "checked_every": check_every,
        **dict(sorted(counts.items())),
        "trace_hash": digest.hexdigest(),
        "failures": [each.failure for each in found if each.failure][:20],
    }


def differing(each_step: list[Walk], sparse: list[Walk]) -> list[int]:
    """Seeds whose walks were done twice, with different hashes."""
    pairs = zip(each_step, sparse, strict=False)
    return [one.seed for one, other in pairs if one.trace_hash != other.trace_hash]


def compare(each_step: list[Walk], sparse: list[Walk]) -> dict[str, object]:
    """For the record."""
    return {
        "each_step": describe(each_step, 1),
        "sparse": describe(sparse, CHECK_EVERY),
        "walks_done_twice": min(len(each_step), len(sparse)),
        "seeds_with_two_hashes": differing(each_step, sparse),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--checked", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    about = {
        "benchmark": "soak_simulator",
        "command": " ".join(command_line()),
        "commit": current_commit(),
        "machine": dataclasses.asdict(describe_machine()),
        "seed": arguments.seed,
    }
    began = time.monotonic()
    each_step, sparse = list[Walk](), list[Walk]()
    with ProcessPoolExecutor(arguments.processes) as pool:
        parts = (each_step, arguments.checked, 1), (sparse, arguments.steps, CHECK_EVERY)
        for found, steps, check_every in parts:
            for so_far in batches(pool, arguments.seed, steps, check_every):
                found[:] = so_far
                result = compare(each_step, sparse) | {"seconds": round(time.monotonic() - began)}
                arguments.output.write_text(json.dumps(about | result, indent=1) + "\n")
    print(json.dumps(compare(each_step, sparse), indent=1))
    has_failed = any(each.failure for each in [*each_step, *sparse])
    return 1 if has_failed or differing(each_step, sparse) else 0


if __name__ == "__main__":
    raise SystemExit(main())
