"""Share of the allocated KV memory that holds no token while a full engine serves chat traffic.

    python -m benchmarks.cache.kv_waste [--requests 1500]
        [--output benchmarks/results/kv_waste.json]

Waste is the paper's (PagedAttention, section 4.2 and figure 2): slots of allocated blocks that
hold no token, averaged over time (steps). Real scheduler and block manager; tokens are random.
Lengths are log-normal with the means that the paper reports in figure 11 (ShareGPT: input 161,
output 338; Alpaca: input 19, output 58); their spreads are our choice (sigma 1.1 and 0.9, and 0.7
and 0.8 of the logarithm). Nothing is shared: every prompt is different.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchmarks.arguments import command_line

from quire.compute.runner.rows import RowTable
from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.resolved import ResolvedScheduler
from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Fcfs, Feasibility, Scheduler
from quire.protocol import EngineRequest, SamplingParams, StepPlan, StepResult

SEED = 0
POOL_TOKENS = 15_700
"""KV slots of the paper's OPT-13B on an A100 with 40 GB (table 1), rounded down to 100."""
MAX_NUM_SEQS = 1024
MAX_MODEL_LEN = 2048
TOKEN_BUDGET = 2560
DEPTH = 2
DEFAULT_OUT = Path(__file__).parents[1] / "results" / "kv_waste.json"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal prompt and output lengths: means in tokens, sigmas of the logarithm."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        prompts = self._draw(rng, self.prompt_mean, self.prompt_sigma, count)
        outputs = self._draw(rng, self.output_mean, self.output_sigma, count)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))

    def _draw(
        self, rng: np.random.Generator, mean: float, sigma: float, count: int
    ) -> npt.NDArray[np.int64]:
        mu = np.log(mean) - sigma**2 / 2
        return np.clip(rng.lognormal(mu, sigma, count), 1, MAX_MODEL_LEN // 2 - 1).astype(np.int64)


TRAFFIC = {
    "sharegpt_like": Lengths(161, 1.1, 338, 0.9),
    "alpaca_like": Lengths(19, 0.7, 58, 0.8),
}


class NullExecutor:
    """Rows without a model: every row that reaches its total draws a random token."""

    def __init__(self, block_size: int) -> None:
        self._rows = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, [block_size])
        self._rng = np.random.default_rng(SEED)

    def execute(self, plan: StepPlan) -> StepResult:
        self._rows.apply(plan)
        rows = self._rows.scheduled()
        self._rows.commit_computed(rows)
        slots = rows.slots[rows.samples]
        tokens = self._rng.integers(0, 30000, len(slots)).astype(np.int32)
        self._rows.append(slots, tokens)
        return StepResult(plan.step_id, slots.astype(np.int32), tokens)


def make_scheduler(block_size: int) -> Scheduler:
    num_blocks = POOL_TOKENS // block_size
    layout = KVLayout.of_windows([None], block_size, KVFormat(1, 1, 1, 2))
    return Scheduler(
        kv=KVManager(layout, num_blocks, MAX_NUM_SEQS, MAX_MODEL_LEN),
        hasher=BlockHasher(block_size, b"benchmark"),
        policy=Fcfs(),
        feasibility=Feasibility(layout, num_blocks, MAX_NUM_SEQS, TOKEN_BUDGET, MAX_MODEL_LEN),
        settings=ResolvedScheduler(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=TOKEN_BUDGET),
        max_model_len=MAX_MODEL_LEN,
    )


def mixed(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Every other request from each kind of traffic."""
    kinds = [lengths.draw(rng, count) for lengths in TRAFFIC.values()]
    return [kinds[i % len(kinds)][i] for i in range(count)]


def serve(pairs: list[tuple[int, int]], block_size: int) -> dict[str, object]:
    """All requests wait from the start, so the pool is full until the queue is empty; readings
    from the first fifth of the requests finished to the last one admitted."""
    rng = np.random.default_rng(SEED + 1)
    scheduler = make_scheduler(block_size)
    num_requests = len(pairs)
    for handle, (num_prompt, num_output) in enumerate(pairs):
        prompt = rng.integers(0, 30000, num_prompt).astype(np.int32)
        params = SamplingParams(max_tokens=num_output)
        scheduler.add(EngineRequest(str(handle), handle, prompt, params, handle))
    executor = NullExecutor(block_size)
    in_flight: deque[StepResult] = deque()
    waste: list[float] = []
    occupancy: list[float] = []
    batch: list[int] = []
    num_finished = 0
    while scheduler.has_unfinished:
        while len(in_flight) < DEPTH and (plan := scheduler.plan(0.0)) is not None:
            in_flight.append(executor.execute(plan))
        stats = scheduler.stats()
        if num_finished > num_requests // 5 and stats.num_waiting:
            slots = stats.num_used_blocks * block_size
            waste.append(1 - stats.num_tokens_in_used_blocks / slots)
            occupancy.append(stats.num_used_blocks / stats.num_blocks)
            batch.append(stats.num_running)
        output = scheduler.apply(in_flight.popleft()) if in_flight else scheduler.flush()
        num_finished += len(output.finished)
    stats = scheduler.stats()
    return {
        "block_size": block_size,
        "waste_percent": round(100 * float(np.mean(waste)), 2),
        "waste_percent_p99": round(100 * float(np.percentile(waste, 99)), 2),
        "pool_in_use_percent": round(100 * float(np.mean(occupancy)), 1),
        "mean_running": round(float(np.mean(batch)), 1),
        "preempted": stats.preempted_total,
        "steps": stats.steps_total,
        "readings": len(waste),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    traffic = {
        name: lengths.draw(np.random.default_rng(SEED), arguments.requests)
        for name, lengths in TRAFFIC.items()
    }
    traffic["mixed"] = mixed(np.random.default_rng(SEED), arguments.requests)
    report = {
        "commit": current_commit(),
        "machine": asdict(describe_machine()),
        "command": " ".join(command_line()),
        "seed": SEED,
        "repeats": 1,
        "requests": arguments.requests,
        "pool_tokens": POOL_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "traffic": {
            name: [serve(pairs, size) for size in (8, 16, 32, 64)]
            for name, pairs in traffic.items()
        },
    }
    text = json.dumps(report, indent=2)
    arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
