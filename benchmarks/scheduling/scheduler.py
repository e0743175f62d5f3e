"""Cost of the plan side: planning and applying a steady step, prefix hashing, admission.

    python -m benchmarks.scheduling.scheduler [--repeats 2500]
        [--output benchmarks/results/scheduler.json]

No model runs: results are made beforehand, so that only `plan` and `apply` are on the clock. Steady
steps are measured in several rounds; the figures are those of the round with the lowest median (the
machine may be busy with other work), and the medians of all rounds are listed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line

from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.resolved import ResolvedScheduler
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Fcfs, Feasibility, Scheduler
from quire.protocol import EngineRequest, SamplingParams, StepPlan, StepResult

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
SEED = 0
NUM_ROUNDS = 5
DEFAULT_OUT = Path(__file__).parents[1] / "results" / "scheduler.json"


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds."""

    median: float
    minimum: float
    p99: float
    repeats: int

    @staticmethod
    def of(nanoseconds: list[int]) -> Timing:
        micro = sorted(t / 1000 for t in nanoseconds)
        p99 = micro[min(int(len(micro) * 0.99), len(micro) - 1)]
        return Timing(
            round(statistics.median(micro), 1), round(micro[0], 1), round(p99, 1), len(micro)
        )

    def to_json(self) -> dict[str, float]:
        return {
            "median_us": self.median,
            "min_us": self.minimum,
            "p99_us": self.p99,
            "repeats": self.repeats,
        }


def make_scheduler(max_num_seqs: int, num_blocks: int) -> Scheduler:
    budget = 8192
    layout = KVLayout.of_windows([None], BLOCK_SIZE, KVFormat(1, 1, 1, 2))
    return Scheduler(
        kv=KVManager(layout, num_blocks, max_num_seqs, MAX_MODEL_LEN),
        hasher=BlockHasher(BLOCK_SIZE, b"benchmark"),
        policy=Fcfs(),
        feasibility=Feasibility(layout, num_blocks, max_num_seqs, budget, MAX_MODEL_LEN),
        settings=ResolvedScheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        max_model_len=MAX_MODEL_LEN,
    )


def make_request(handle: int, prompt: np.ndarray, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(handle),
        first_handle=handle,
        prompt_token_ids=prompt.astype(np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        seed=handle,
        stop_token_ids=frozenset({2}),
        arrival_time=float(handle),
    )


def plan_bytes(plan: StepPlan) -> int:
    """Size of a plan in a plain encoding: step id (8), one presence byte per field, then a 4-byte
    length and 4 bytes per integer for each array that is not empty. Entering rows are not sized."""
    arrays = (
        plan.leave,
        plan.copy_src,
        plan.copy_dst,
        plan.table_group,
        plan.table_slot,
        plan.table_index,
        plan.table_block,
        plan.delta_slot,
        plan.delta_tokens,
    )
    return 8 + len(arrays) + 2 + sum(4 + 4 * len(array) for array in arrays if len(array))


def steady_step(
    num_seqs: int, repeats: int, lockstep: bool = False, depth: int = 2
) -> tuple[dict[str, object], Timing]:
    """Decode steps of `num_seqs` sequences, two in flight; prompts of 65 to 320 tokens, so that
    block boundaries are spread over the steps as they are in service. lockstep: prompts of equal
    length, so that all boundaries fall into one step of sixteen and the others change nothing."""
    rng = np.random.default_rng(SEED)
    scheduler = make_scheduler(num_seqs, num_blocks=num_seqs * 200)
    for handle in range(num_seqs):
        prompt = rng.integers(3, 30000, 7 if lockstep else int(rng.integers(65, 321)))
        scheduler.add(make_request(handle, prompt, max_tokens=2800))
    all_slots = np.arange(num_seqs, dtype=np.int32)
    drain_prompts(scheduler, num_seqs)
    in_flight: list[int] = []
    for _ in range(depth - 1):
        plan = scheduler.plan(0.0)
        assert plan is not None
        in_flight.append(plan.step_id)
    plan_times: list[int] = []
    apply_times: list[int] = []
    total_times: list[int] = []
    sizes: list[int] = []
    tokens = rng.integers(3, 30000, (repeats, num_seqs)).astype(np.int32)
    for repeat in range(repeats):
        start = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        middle = time.perf_counter_ns()
        assert plan is not None
        in_flight.append(plan.step_id)
        result = StepResult(in_flight.pop(0), all_slots, tokens[repeat])
        resumed = time.perf_counter_ns()
        output = scheduler.apply(result)
        end = time.perf_counter_ns()
        assert len(output.handles) == num_seqs
        plan_times.append(middle - start)
        apply_times.append(end - resumed)
        total_times.append(middle - start + end - resumed)
        sizes.append(plan_bytes(plan))
    total = Timing.of(total_times)
    report: dict[str, object] = {
        "sequences": num_seqs,
        "plan_and_apply": total.to_json(),
        "plan": Timing.of(plan_times).to_json(),
        "apply": Timing.of(apply_times).to_json(),
        "plan_bytes_least": min(sizes),
        "plan_bytes_mean": round(statistics.mean(sizes), 1),
    }
    return report, total


def best_round(num_seqs: int, repeats: int, lockstep: bool = False) -> dict[str, object]:
    rounds = [steady_step(num_seqs, repeats // NUM_ROUNDS, lockstep) for _ in range(NUM_ROUNDS)]
    medians = [total.median for _, total in rounds]
    best = rounds[medians.index(min(medians))][0]
    return {**best, "medians_of_rounds_us": medians}


def drain_prompts(scheduler: Scheduler, num_seqs: int) -> None:
    """Run until every sequence decodes: rows that reached their total draw token 3."""
    tokens = scheduler.state.table
    while True:
        before = tokens.num_total.copy()
        plan = scheduler.plan(0.0)
        assert plan is not None
        sampled = np.flatnonzero(tokens.num_total > before)
        grown = [slot for slot in sampled.tolist() if before[slot]]
        entered = [
            row.slot for row in plan.enter if tokens.num_total[row.slot] > len(row.token_ids)
        ]
        slots = np.array(sorted({*grown, *entered}), np.int32)
        scheduler.apply(StepResult(plan.step_id, slots, np.full(len(slots), 3, np.int32)))
        if len(slots) == num_seqs:
            return


def measure(action: Callable[[], object], repeats: int) -> Timing:
    times: list[int] = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return Timing.of(times)


def hashing(repeats: int) -> dict[str, object]:
    """Names of the 256 blocks of a prompt of 4,096 tokens, and the lookup of all of them."""
    rng = np.random.default_rng(SEED)
    prompt = rng.integers(3, 30000, 4096).astype(np.int32)
    hasher = BlockHasher(BLOCK_SIZE, b"benchmark")

    def hash_all() -> None:
        hasher.extend([], prompt, hasher.root())

    names: list[bytes] = []
    hasher.extend(names, prompt, hasher.root())
    layout = KVLayout.of_windows([None], BLOCK_SIZE, KVFormat(1, 1, 1, 2))
    kv = KVManager(layout, 1024, 4, MAX_MODEL_LEN)
    slot, zero, end = np.array([0]), np.array([0]), np.array([4096])
    assert kv.grow(slot, zero, end)
    kv.publish(0, names, 256)
    kv.free(0)
    times: list[int] = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        hit = kv.prefixes.lookup(names, 4095)
        kv.enter(1, hit)
        times.append(time.perf_counter_ns() - start)
        assert hit.num_tokens == 255 * BLOCK_SIZE
        kv.free(1)
    return {
        "prompt_tokens": 4096,
        "hash_at_arrival": measure(hash_all, repeats).to_json(),
        "lookup_and_enter_on_step_path": Timing.of(times).to_json(),
    }


def admission(repeats: int) -> dict[str, object]:
    """A prompt of 1,024 tokens into an engine that serves 255 others: `add`, and how much longer
    the plan that admits it takes than one that admits nobody."""
    rng = np.random.default_rng(SEED)
    adds: list[int] = []
    plans: list[int] = []
    steady: list[int] = []
    scheduler = make_scheduler(256, num_blocks=256 * 200)
    for handle in range(255):
        scheduler.add(make_request(handle, rng.integers(3, 30000, 100), max_tokens=3000))
    drain_prompts(scheduler, 255)
    others = np.arange(255, dtype=np.int32)
    for repeat in range(repeats):
        request = make_request(1000 + repeat, rng.integers(3, 30000, 1024), max_tokens=16)
        start = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        steady.append(time.perf_counter_ns() - start)
        assert plan is not None
        scheduler.apply(StepResult(plan.step_id, others, np.full(255, 3, np.int32)))
        start = time.perf_counter_ns()
        scheduler.add(request)
        adds.append(time.perf_counter_ns() - start)
        start = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        plans.append(time.perf_counter_ns() - start)
        assert plan is not None
        assert len(plan.enter) == 1
        scheduler.abort(request.first_handle)
        scheduler.apply(StepResult(plan.step_id, others, np.full(255, 3, np.int32)))
    return {
        "prompt_tokens": 1024,
        "add": Timing.of(adds).to_json(),
        "plan_with_admission": Timing.of(plans).to_json(),
        "plan_without": Timing.of(steady).to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2500)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    report = {
        "commit": current_commit(),
        "machine": asdict(describe_machine()),
        "command": " ".join(command_line()),
        "seed": SEED,
        "block_size": BLOCK_SIZE,
        "rounds": NUM_ROUNDS,
        "steady_decode": [best_round(n, arguments.repeats) for n in (16, 64, 256, 1024)],
        "nothing_changes_in_15_of_16_steps": [
            best_round(n, arguments.repeats, lockstep=True) for n in (256, 1024)
        ],
        "prefix": hashing(min(arguments.repeats, 1000)),
        "admission": admission(min(arguments.repeats, 1000)),
    }
    text = json.dumps(report, indent=2)
    arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
