"""One simulation as a user asks for it: a model, devices, a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quire.entrypoints.simulator.memory import num_kv_blocks
from quire.entrypoints.simulator.run import Served, serve
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import SystemShape, build_core
from quire.entrypoints.simulator.workloads.trace import (
    TraceRequest,
    check_fits,
    engine_requests,
    longest,
)

__all__ = ["Report", "default_shape", "make_report", "render_report", "simulate"]


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulated run. Times in seconds; rates per second of simulated time."""

    system: str
    cost: dict[str, Any]
    kv_slots: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    simulated_s: float
    requests_per_s: float
    output_tokens_per_s: float
    normalized_latency_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    mean_running: float
    preempted: int
    steps: int
    busy_share: float
    trace_hash: str

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def simulate(
    trace: Sequence[TraceRequest], cost: StepCost, shape: SystemShape, *, seed: int = 0
) -> Report:
    """Serve a trace. ConfigError if a request is longer than the context."""
    check_fits(trace, shape.max_model_len)
    rows = min(shape.max_model_len, longest(trace))
    built = build_core(cost, replace(shape, max_model_len=rows), seed)
    served = serve(built, engine_requests(trace, cost.spec.vocab_size))
    return make_report("quire", trace, cost, shape.num_kv_blocks * shape.block_size, served)


def render_report(report: Report) -> str:
    """A few aligned lines."""
    cost = report.cost
    rows = [
        ("system", f"{report.system}, {cost['model']} on {cost['devices']} x {cost['device']}"),
        ("KV slots", f"{report.kv_slots:,}"),
        (
            "requests",
            f"{report.requests:,}: {report.prompt_tokens:,} prompt and {report.output_tokens:,} "
            "output tokens",
        ),
        ("simulated", f"{report.simulated_s:,.1f} s, {report.steps:,} steps"),
        ("busy", f"{100 * report.busy_share:.1f} %"),
        (
            "throughput",
            f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:,.0f} tokens/s",
        ),
        ("latency", f"{report.normalized_latency_s:.4f} s per output token, arrival to end"),
        *(
            (name, ", ".join(f"{key} {value:.4f}" for key, value in part.items()) + " s")
            for name, part in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s))
        ),
        ("sequences", f"{report.mean_running:.1f} in a step, {report.preempted} preempted"),
    ]
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def make_report(
    system: str, trace: Sequence[TraceRequest], cost: StepCost, slots: int, served: Served
) -> Report:
    """Return the figures of a trace that `system` served with `slots` KV slots."""
    span = float(served.finished_s.max() - served.arrival_s.min())
    return Report(
        system=system,
        cost=cost.describe(),
        kv_slots=slots,
        requests=len(trace),
        prompt_tokens=sum(each.prompt_tokens for each in trace),
        output_tokens=sum(each.output_tokens * each.n for each in trace),
        simulated_s=span,
        requests_per_s=len(trace) / span,
        output_tokens_per_s=sum(each.output_tokens * each.n for each in trace) / span,
        normalized_latency_s=served.normalized_latency_s,
        ttft_s=_spread(served.ttft_s),
        tpot_s=_spread(served.tpot_s),
        mean_running=served.mean_running,
        preempted=served.num_preempted,
        steps=served.num_steps,
        busy_share=served.busy_s / span,
        trace_hash=served.trace_hash,
    )


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p99": p99, "max": float(values.max())}


def default_shape(cost: StepCost, **changes: Any) -> SystemShape:
    """Return the settings of a server that fills its devices. changes: other values by name."""
    values = {"max_model_len": cost.spec.max_context, **changes}
    if values.get("num_kv_blocks") is None:
        values["num_kv_blocks"] = num_kv_blocks(cost)
    return SystemShape(**values)
