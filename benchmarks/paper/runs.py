"""Single simulations of the paper's setups, described so that other processes can perform them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from benchmarks.paper.baselines import OrcaMemory
from benchmarks.paper.prices import StepPrices
from benchmarks.paper.systems import serve_by

from quire.entrypoints.simulator.devices import device_named
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.run import Served, serve
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import BuiltSystem, SystemShape, build_core
from quire.entrypoints.simulator.workloads import (
    TraceRequest,
    draw_chat_prompts,
    draw_trace,
    engine_requests,
)

__all__ = ["LATENCY_LIMIT_S", "SETUPS", "SYSTEMS", "Curve", "Outcome", "Run", "Scale", "Setup",
           "find_rate", "perform", "perform_scaled", "sustained_rate"]  # fmt: skip

Scale = tuple[str, float]
"""Name and factor of a constant of the device that is changed; "" for none."""

MAX_NUM_SEQS = 1024
"""Sequences in a step at most, of all systems: the memory is the limit."""

STEP_TOKENS = 2560
MAX_MODEL_LEN = 2048

LATENCY_LIMIT_S = 0.5
"""Normalized latency up to which a rate counts as sustained: the middle of the paper's axes."""

LOADS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
"""Rates of a curve, over that at which all requests wait. Above it the latency is that of a queue
which grows as long as the trace lasts."""

SATURATING = 6
"""Requests of a saturated run, over those that fit the memory together."""

READ_EVERY = 4
"""Steps between two readings of the memory."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One server of the paper (table 1). slots: tokens that its KV cache holds."""

    model: str
    device: str
    num_devices: int
    slots: int


SETUPS: Mapping[str, Setup] = {
    "opt-13b": Setup("opt-13b", "a100-40", 1, 15_700),
    "opt-66b": Setup("opt-66b", "a100-40", 4, 9_700),
    "opt-175b": Setup("opt-175b", "a100-80", 8, 60_100),
    "llama-13b": Setup("llama-13b", "a100-40", 1, 15_700),
    "llama-3.1-8b": Setup("llama-3.1-8b", "a100-40", 1, 131_072),
}

SYSTEMS: Mapping[str, str] = {
    "quire": "quire",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "faster-transformer": "FasterTransformer",
}
"""Systems by name, as plots call them."""


@dataclass(frozen=True, slots=True)
class Run:
    """rate: requests per second; inf: all wait from the start, and as many as saturate the memory.
    changes: settings of `SystemShape` by name."""

    setup: str
    system: str
    workload: str
    rate: float = math.inf
    seconds: float = 900.0
    seed: int = 0
    n: int = 1
    is_search: bool = False
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """memory: shares of KV slots by use, while requests wait. saved: share of the blocks that
    tables name which sharing saves. Times in seconds."""

    normalized_latency_s: float
    requests_per_s: float
    mean_running: float
    num_preempted: int
    ttft_mean_s: float
    ttft_p99_s: float
    ttft_max_s: float
    ttft_short_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    saved: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (rate, normalized latency), by rate. sustained: the highest rate within the limit and
    `capacity`, the requests per second while all wait."""

    capacity: float
    sustained: float
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class _BlockReadings:
    """Sums over the steps after which requests wait."""

    held: float = 0.0
    used: float = 0.0
    slots: float = 0.0
    saved: int = 0
    entries: int = 0
    steps: int = 0

    def read(self, system: BuiltSystem, block_size: int) -> None:
        self.steps += 1
        if self.steps % READ_EVERY:
            return
        stats = system.scheduler.stats()
        self.saved += stats.num_table_entries - stats.num_used_blocks
        self.entries += stats.num_table_entries
        if stats.num_waiting:
            self.held += stats.num_tokens_in_used_blocks
            self.used += stats.num_used_blocks * block_size
            self.slots += stats.num_blocks * block_size

    def shares(self) -> dict[str, float]:
        if not self.slots:
            return {}
        held, used = min(self.held / self.slots, 1.0), self.used / self.slots
        return {"held": held, "reserved": 0.0, "internal": used - held, "free": 1.0 - used}


@dataclass(frozen=True, slots=True)
class _Result:
    """A trace as a system served it. memory, saved: see `Outcome`."""

    served: Served
    memory: Mapping[str, float]
    saved: float = 0.0


def perform(run: Run) -> Outcome:
    """Simulate one run."""
    setup = SETUPS[run.setup]
    trace = _trace_of(run, setup)
    result = _serve(run, setup, trace, _cost_of(run, setup))
    return _outcome(result.served, trace, result)


def perform_scaled(run: Run, scales: Sequence[Scale]) -> list[Outcome]:
    """Simulate one run in which all requests wait, with each of these changes to its device. The
    `memory` of all is that of the device as it is."""
    assert math.isinf(run.rate), "a run at a rate depends on the times of its steps"
    setup = SETUPS[run.setup]
    trace = _trace_of(run, setup)
    cost = StepPrices(_cost_of(run, setup), [_cost_of(run, setup, scale) for scale in scales])
    result = _serve(run, setup, trace, cost)
    return [_outcome(each, trace, result) for each in cost.served_by_others(result.served)]


def find_rate(run: Run, capacity: float) -> Curve:
    """Serve at `LOADS`. capacity: requests per second while all wait."""
    rates = [load * capacity for load in LOADS]
    latencies = [perform(replace(run, rate=rate)).normalized_latency_s for rate in rates]
    points = tuple(zip(rates, latencies, strict=True))
    return Curve(capacity, sustained_rate(points), points)


def sustained_rate(points: Sequence[tuple[float, float]]) -> float:
    """Return the rate at which a curve of (rate, latency) crosses the limit, on a line between the
    logarithms; the last rate if it never does, the first one if that is above it."""
    rates, latencies = zip(*points, strict=True)
    above = next((i for i, each in enumerate(latencies) if each > LATENCY_LIMIT_S), None)
    if above is None:
        return rates[-1]
    if above == 0:
        return rates[0]
    low, high = latencies[above - 1 : above + 1]
    share = math.log(LATENCY_LIMIT_S / low) / math.log(high / low)
    return rates[above - 1] * (rates[above] / rates[above - 1]) ** share


def _serve(run: Run, setup: Setup, trace: Sequence[TraceRequest], cost: StepCost) -> _Result:
    if run.system == "quire":
        return _serve_quire(run, setup, trace, cost)
    memory = OrcaMemory()
    served = serve_by(
        run.system,
        trace,
        cost,
        num_slots=setup.slots,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        memory=memory,
    )
    return _Result(served, {} if run.system == "faster-transformer" else memory.shares())


def _serve_quire(run: Run, setup: Setup, trace: Sequence[TraceRequest], cost: StepCost) -> _Result:
    block_size = _block_size_of(run)
    values: dict[str, Any] = {
        "num_kv_blocks": setup.slots // block_size,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_model_len": max(MAX_MODEL_LEN, *(each.num_tokens for each in trace)),
        **dict(run.changes),
    }
    system = build_core(cost, SystemShape(**values), run.seed)
    requests = engine_requests(trace, model_spec(setup.model).vocab_size)
    readings = _BlockReadings()
    served = serve(system, requests, partial(readings.read, system, block_size))
    saved = readings.saved / readings.entries if readings.entries else 0.0
    return _Result(served, readings.shares(), saved)


def _block_size_of(run: Run) -> int:
    return int(dict(run.changes).get("block_size", 16))


def _cost_of(run: Run, setup: Setup, scale: Scale = ("", 1.0)) -> StepCost:
    """Times of the run's device, with K/V in one piece but for quire."""
    device = device_named(setup.device)
    if scale[0]:
        device = device.scaled(*scale)
    block_size = _block_size_of(run) if run.system == "quire" else None
    spec = model_spec(setup.model)
    return StepCost(device, spec, num_devices=setup.num_devices, block_size=block_size)


def _trace_of(run: Run, setup: Setup) -> list[TraceRequest]:
    """Requests at the run's rate, or all of them at once."""
    rate, seconds = run.rate, run.seconds
    is_saturated = math.isinf(rate)
    if is_saturated:
        mean = _mean_tokens(run.workload) * (1 + 0.5 * (run.n - 1))
        rate, seconds = max(SATURATING * setup.slots / mean, 100.0), 1.0
    if run.workload == "paper-chat":
        trace = draw_chat_prompts(rate=rate, seconds=seconds, seed=run.seed)
    else:
        trace = draw_trace(
            run.workload,
            rate=rate,
            seconds=seconds,
            seed=run.seed,
            max_model_len=MAX_MODEL_LEN,
            n=run.n,
            is_search=run.is_search,
        )
    return [replace(each, arrival_s=0.0) for each in trace] if is_saturated else trace


def _mean_tokens(workload: str) -> float:
    """Return the tokens that a request of the workload holds for itself alone in the mean over its
    life, roughly."""
    sample = (
        draw_chat_prompts(rate=100, seconds=1, seed=0)
        if workload == "paper-chat"
        else draw_trace(workload, rate=100, seconds=1, seed=0, max_model_len=MAX_MODEL_LEN)
    )
    own = [
        each.prompt_tokens - sum(piece.length for piece in each.pieces) + each.output_tokens / 2
        for each in sample
    ]
    return float(np.mean(own))


def _outcome(served: Served, trace: Sequence[TraceRequest], result: _Result) -> Outcome:
    """served: the run of `result`, or the same on another device."""
    ttft, tpot = served.ttft_s, served.tpot_s
    prompts = np.array([each.prompt_tokens for each in trace])
    return Outcome(
        normalized_latency_s=served.normalized_latency_s,
        requests_per_s=served.requests_per_s,
        mean_running=served.mean_running,
        num_preempted=served.num_preempted,
        ttft_mean_s=float(ttft.mean()),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        ttft_max_s=float(ttft.max()),
        ttft_short_s=float(ttft[prompts <= np.median(prompts)].mean()),
        tpot_mean_s=float(tpot.mean()),
        tpot_p99_s=float(np.percentile(tpot, 99)),
        saved=result.saved,
        memory=result.memory,
    )
