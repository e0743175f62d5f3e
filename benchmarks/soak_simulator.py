"""A million simulated steps with a small pool: preemption, swaps, samples, beams and forks.

    python benchmarks/soak_simulator.py [--steps 1000000] [--checked 50000] [--seed 0]

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
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulator.systems import COST, crowded_system, crowded_trace

from quire.bench.machine import current_commit, describe_machine
from quire.errors import EngineError
from quire.simulator import serve
from quire.simulator.workloads import engine_requests

BATCH = 10
"""Walks that are begun together; whole batches are counted."""

CHECK_EVERY = 1000
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "soak" / "simulator.json"


@dataclass(frozen=True, slots=True)
class Walk:
    """trace_hash: of its steps. failure: "" if nothing was found."""

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


def soak(pool: ProcessPoolExecutor, first_seed: int, steps: int, check_every: int) -> list[Walk]:
    """Walks from a seed on, until these have so many steps or a whole batch has failed."""
    found: list[Walk] = []
    done, seed, batch = 0, first_seed, list[Walk]()
    while done < steps and not (batch and all(each.failure for each in batch)):
        seeds = range(seed, seed + BATCH)
        batch = list(pool.map(partial(walk, check_every=check_every), seeds))
        found += batch
        done += sum(each.counts["steps"] for each in batch)
        seed += BATCH
        print(f"{done} steps", flush=True)
    return found


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
    commit, began = current_commit(), time.monotonic()
    with ProcessPoolExecutor(arguments.processes) as pool:
        each_step = soak(pool, arguments.seed, arguments.checked, 1)
        sparse = soak(pool, arguments.seed, arguments.steps, CHECK_EVERY)
    pairs = list(zip(each_step, sparse, strict=False))
    differing = [one.seed for one, other in pairs if one.trace_hash != other.trace_hash]
    report = {
        "benchmark": "soak_simulator",
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": dataclasses.asdict(describe_machine()),
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        "each_step": describe(each_step, 1),
        "sparse": describe(sparse, CHECK_EVERY),
        "walks_done_twice": len(pairs),
        "seeds_with_two_hashes": differing,
    }
    print(json.dumps(report, indent=1))
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if differing or any(each.failure for each in [*each_step, *sparse]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
