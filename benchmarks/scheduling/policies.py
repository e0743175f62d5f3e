"""Scheduling policies on one heavy-tailed trace: time to first token, waiting, cost of a plan.

    python -m benchmarks.scheduling.policies [--requests 1000] [--repeats 3] [--output FILE]

The scheduler is real; steps take the time of a cost model (`quire.entrypoints.simulator`:
Llama-3.1-8B on an A100), and tokens are constants, so TTFT and waiting are exact and the same on
any machine. Planning is on this machine's clock: the policies take turns, and each figure is the
median of the repeats with their spread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line

from quire.config.settings import SCHEDULING_POLICIES
from quire.entrypoints.bench.record import Spread, new_record, percentile, spread_of
from quire.entrypoints.simulator import (
    Served,
    StepCost,
    SystemShape,
    build_core,
    device_named,
    serve,
)
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.system import BuiltSystem
from quire.protocol import EngineRequest, SamplingParams, SchedulingParams

DEFAULT_OUT = Path(__file__).parents[1] / "results" / "policies.json"
SEED = 0
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16384
NUM_BLOCKS = 8192  # 17 GB beside 16 GB of weights
MAX_NUM_SEQS = 64
STEP_TOKENS = 512
VOCAB = 30000

COST = StepCost(device_named("a100-40"), model_spec("llama-3.1-8b"))

MEDIAN_PROMPT, SIGMA = 200, 1.4  # log-normal; one prompt in a hundred is 26 times the median
MIN_PROMPT, MAX_PROMPT = 8, 12000
OUTPUT_TOKENS = (8, 64)
LOAD = 0.85  # of the rate at which full steps would compute the trace, attention not counted
SHARED_PREFIXES, SHARED_TOKENS, SHARED_SHARE = 8, 128, 0.3
THRESHOLD = 128  # of the one run with long_prefill_token_threshold
TENANTS = ("heavy", "light")
HEAVY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: np.ndarray
    max_tokens: int
    priority: int
    tenant: str


def make_trace(count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals of log-normal prompts, some of which begin with one of a few prefixes."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(MEDIAN_PROMPT), SIGMA, count))
    lengths = np.clip(lengths, MIN_PROMPT, MAX_PROMPT).astype(int)
    outputs = rng.integers(*OUTPUT_TOKENS, count, endpoint=True)
    seconds = float((lengths + outputs).sum()) * COST.token_s / LOAD
    times = np.sort(rng.uniform(0.0, seconds, count))
    prefixes = rng.integers(3, VOCAB, (SHARED_PREFIXES, SHARED_TOKENS))
    trace: list[Arrival] = []
    for at_s, length, output in zip(times, lengths, outputs, strict=True):
        prompt = rng.integers(3, VOCAB, length)
        if length > SHARED_TOKENS and rng.random() < SHARED_SHARE:
            prompt[:SHARED_TOKENS] = prefixes[rng.integers(SHARED_PREFIXES)]
        trace.append(
            Arrival(
                float(at_s),
                prompt.astype(np.int32),
                int(output),
                priority=int(rng.integers(3)),
                tenant=TENANTS[int(rng.random() >= HEAVY_SHARE)],
            )
        )
    return trace


def make_system(
    policy: str, threshold: int | None, *, num_seqs: int, step_tokens: int
) -> BuiltSystem:
    shape = SystemShape(
        num_kv_blocks=max(NUM_BLOCKS, num_seqs * 200),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=MAX_MODEL_LEN,
        scheduling_policy=policy,
        enable_prefix_caching=True,
        long_prefill_token_threshold=threshold,
    )
    return build_core(COST, shape)


def make_request(handle: int, arrival: Arrival, scheduler_knows_priority: bool) -> EngineRequest:
    return EngineRequest(
        request_id=str(handle),
        first_handle=handle,
        prompt_token_ids=arrival.prompt,
        params=SamplingParams(max_tokens=arrival.max_tokens),
        seed=handle,
        arrival_time=arrival.at_s,
        scheduling=SchedulingParams(
            priority=arrival.priority if scheduler_knows_priority else 0, tenant=arrival.tenant
        ),
    )


def serve_trace(trace: Sequence[Arrival], policy: str, threshold: int | None) -> Served:
    """All of the trace, by a scheduler of its own."""
    system = make_system(policy, threshold, num_seqs=MAX_NUM_SEQS, step_tokens=STEP_TOKENS)
    knows_priority = system.scheduler.uses_priority
    requests = [make_request(i, arrival, knows_priority) for i, arrival in enumerate(trace)]
    return serve(system, requests)


def waits(trace: Sequence[Arrival], served: Served) -> list[float]:
    """Seconds from arrival to the first token, by request."""
    firsts = served.first_token_s.tolist()
    return [at - arrival.at_s for at, arrival in zip(firsts, trace, strict=True)]


def figures_of(trace: Sequence[Arrival], served: Served) -> dict[str, float]:
    """TTFT of all, of the short half and of the longest hundredth of the prompts, by tenant and by
    priority; `max` is the longest that anyone waited."""
    waited = waits(trace, served)
    ttft, lengths = np.array(waited), np.array([len(arrival.prompt) for arrival in trace])
    short = ttft[lengths <= np.median(lengths)]
    long = ttft[lengths >= np.percentile(lengths, 99)]
    found = {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": percentile(waited, 50),
        "ttft_p99_s": percentile(waited, 99),
        "ttft_max_s": float(ttft.max()),
        "ttft_mean_short_s": float(short.mean()),
        "ttft_p99_short_s": percentile(short.tolist(), 99),
        "ttft_mean_long_s": float(long.mean()),
        "preempted": float(served.num_preempted),
    }
    for tenant in TENANTS:
        mine = [t for t, arrival in zip(ttft, trace, strict=True) if arrival.tenant == tenant]
        found[f"ttft_mean_tenant_{tenant}_s"] = float(np.mean(mine))
    for level in range(3):
        mine = [t for t, arrival in zip(ttft, trace, strict=True) if arrival.priority == level]
        found[f"ttft_mean_priority_{level}_s"] = float(np.mean(mine))
    return {name: round(value, 4) for name, value in found.items()}


def blocked(policy: str, threshold: int | None) -> float:
    """Head-of-line blocking: TTFT of a prompt of 32 tokens that comes 10 ms after one of 12,000."""
    rng = np.random.default_rng(SEED)
    trace = [
        Arrival(0.0, rng.integers(3, VOCAB, 12000).astype(np.int32), 8, 0, TENANTS[0]),
        Arrival(0.01, rng.integers(3, VOCAB, 32).astype(np.int32), 8, 0, TENANTS[1]),
    ]
    return waits(trace, serve_trace(trace, policy, threshold))[1]


def steady_plan_us(policy: str, *, num_running: int, num_waiting: int, steps: int) -> float:
    """Median cost of planning a decode step while every slot is taken and others wait."""
    system = make_system(policy, None, num_seqs=num_running, step_tokens=8192)
    scheduler, executor = system.scheduler, system.executor
    rng = np.random.default_rng(SEED)
    for handle in range(num_running + num_waiting):
        prompt = rng.integers(3, VOCAB, int(rng.integers(65, 321))).astype(np.int32)
        arrival = Arrival(float(handle), prompt, 2000, 0, f"tenant-{handle % 10}")
        scheduler.add(make_request(handle, arrival, scheduler_knows_priority=False))
    costs: list[float] = []
    while len(costs) < steps:
        started = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        seconds = time.perf_counter_ns() - started
        assert plan is not None
        result = executor.execute(plan).result()
        if len(result.slots) == num_running and not plan.enter:
            costs.append(seconds / 1000)
        scheduler.apply(result)
    return percentile(costs, 50)


def runs() -> dict[str, tuple[str, int | None]]:
    """Return runs by name: each policy as it comes, and fcfs with a cap on what a prompt computes
    in a step."""
    plain = {name: (name, None) for name in SCHEDULING_POLICIES}
    return {**plain, f"fcfs_threshold_{THRESHOLD}": ("fcfs", THRESHOLD)}


def measure(trace: Sequence[Arrival], repeats: int) -> dict[str, Spread]:
    figures: dict[str, Spread] = {}
    steady: dict[str, list[float]] = {name: [] for name in SCHEDULING_POLICIES}
    for _ in range(repeats):
        for name in SCHEDULING_POLICIES:
            cost = steady_plan_us(name, num_running=256, num_waiting=1000, steps=200)
            steady[name].append(round(cost, 1))
    for name, (policy, threshold) in runs().items():
        served = serve_trace(trace, policy, threshold)
        for figure, value in figures_of(trace, served).items():
            figures[f"{name}.{figure}"] = spread_of([value])
        figures[f"{name}.ttft_blocked_s"] = spread_of([round(blocked(policy, threshold), 4)])
    for name, costs in steady.items():
        figures[f"{name}.plan_steady_256_running_1000_waiting_us"] = spread_of(costs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    trace = make_trace(arguments.requests, SEED)
    record = new_record(
        "policies",
        command_line(),
        None,
        None,
        seed=SEED,
        workload={
            "requests": len(trace),
            "seconds": round(trace[-1].at_s, 1),
            "prompt_tokens": int(sum(len(arrival.prompt) for arrival in trace)),
            "longest_prompt": max(len(arrival.prompt) for arrival in trace),
            "median_prompt": int(np.median([len(arrival.prompt) for arrival in trace])),
            "cost": COST.describe(),
            "load": LOAD,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": STEP_TOKENS,
            "num_kv_blocks": NUM_BLOCKS,
            "depth": 2,
        },
        figures=measure(trace, arguments.repeats),
    )
    record.save(arguments.output)
    for name, spread in record.figures.items():
        print(f"{name:60} {spread.median:12.4f}")


if __name__ == "__main__":
    main()
