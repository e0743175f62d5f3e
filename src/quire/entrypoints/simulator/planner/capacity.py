"""The fewest devices of each kind that keep the limits, and what gives way first beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.entrypoints.simulator.devices import device_named
from quire.entrypoints.simulator.memory import num_kv_blocks, weights_fit
from quire.entrypoints.simulator.planner.slo import METRICS, SLO
from quire.entrypoints.simulator.run import Served, serve
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import SystemShape, build_core
from quire.entrypoints.simulator.workloads.trace import (
    TraceRequest,
    check_fits,
    engine_requests,
    longest,
)

__all__ = [
    "DEGREES",
    "MAX_REPLICAS",
    "MAX_REQUESTS",
    "Capacity",
    "Option",
    "Replica",
    "plan_capacity",
]

DEGREES = (1, 2, 4, 8)
"""Devices that share a model, tensor-parallel."""

MAX_REPLICAS = 64
MAX_REQUESTS = 2000
"""Requests of the trace that are simulated, its first ones."""

FEW = 16
"""Requests that tell, far apart, whether a device is fast enough for one alone."""

LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
BUSY = 0.95
"""Share of the time from which a device counts as the limit."""

MakeCost = Callable[[str, int], StepCost]
"""(device, devices that share the model) → cost. ConfigError if the heads cannot be shared."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Server of `cost.num_devices` devices with these settings."""

    cost: StepCost
    shape: SystemShape

    def serve(self, trace: Sequence[TraceRequest], num_replicas: int = 1) -> Served:
        """Serve every `num_replicas`-th request, as one of so many servers would."""
        own = trace[::num_replicas]
        shape = replace(self.shape, max_model_len=min(self.shape.max_model_len, longest(trace)))
        return serve(build_core(self.cost, shape), engine_requests(own, self.cost.spec.vocab_size))


def compressed(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the same requests, `factor` times as often."""
    return [replace(each, arrival_s=each.arrival_s / factor) for each in trace]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the workload. kept: share of the requests that keep all limits."""

    device: str
    degree: int
    replicas: int
    num_kv_blocks: int
    kept: float
    strain: float

    @property
    def num_devices(self) -> int:
        return self.degree * self.replicas


@dataclass(frozen=True, slots=True)
class Load:
    """goodput: requests per second that keep all limits."""

    rate: float
    kept: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """options: fewest devices first. loads: loads of the first option, by rate. breaks: description
    of what gives way when the traffic doubles. unfit: reasons why devices were left out, by name
    and degree."""

    requests: int
    rate: float
    slo: SLO
    settings: dict[str, Any]
    options: tuple[Option, ...]
    loads: tuple[Load, ...]
    breaks: str
    unfit: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        options = [{**asdict(each), "num_devices": each.num_devices} for each in self.options]
        return {
            "requests": self.requests,
            "requests_per_s": self.rate,
            "slo": {"limits": dict(self.slo.limits), "share": self.slo.share},
            "settings": self.settings,
            "options": options,
            "loads": [asdict(load) for load in self.loads],
            "when_doubled": self.breaks,
            "unfit": self.unfit,
        }


def plan_capacity(
    trace: Sequence[TraceRequest],
    slo: SLO,
    make_cost: MakeCost,
    devices: Sequence[str],
    degrees: Sequence[int] = DEGREES,
    **settings: Any,
) -> Capacity:
    """Find the fewest devices of each kind, alone and in groups that share the model. degrees:
    sizes of these groups. settings: values by name in `SystemShape`. ConfigError if nothing keeps
    the limits; it says how far each comes."""
    trace = list(trace[:MAX_REQUESTS])
    rate = (len(trace) - 1) / max(trace[-1].arrival_s - trace[0].arrival_s, 1e-9)
    found: list[tuple[Option, Replica]] = []
    unfit: dict[str, str] = {}
    for device, degree in ((device, degree) for device in devices for degree in degrees):
        label = f"{degree} x {device_named(device).name}"
        try:
            replica = _replica(make_cost(device, degree), settings)
            check_fits(trace, replica.shape.max_model_len)
            found.append((_fewest(replica, trace, slo), replica))
        except (ConfigError, RequestError) as error:
            unfit[label] = str(error)
    if not found:
        reasons = "; ".join(f"{label}: {why}" for label, why in unfit.items())
        raise ConfigError(f"No device serves this workload within {slo.describe()}. {reasons}")
    found.sort(key=lambda pair: (pair[0].num_devices, pair[0].strain))
    best, replica = found[0]
    return Capacity(
        requests=len(trace),
        rate=rate,
        slo=slo,
        settings=_shown(replica.shape),
        options=tuple(option for option, _ in found),
        loads=tuple(_loads(replica, best, trace, slo, rate)),
        breaks=_what_breaks(replica, best, trace, slo),
        unfit=unfit,
    )


def _replica(cost: StepCost, settings: dict[str, Any]) -> Replica:
    if not weights_fit(cost):
        raise ConfigError("the weights leave no room for a KV cache")
    values = {"max_model_len": cost.spec.max_context, **settings}
    return Replica(cost, SystemShape(num_kv_blocks=num_kv_blocks(cost), **values))


def _fewest(replica: Replica, trace: Sequence[TraceRequest], slo: SLO) -> Option:
    """Return the fewest servers that keep the limits. ConfigError if even many do not."""

    def option(count: int) -> Option:
        served = replica.serve(trace, count)
        return Option(
            replica.cost.device.name,
            replica.cost.num_devices,
            count,
            replica.shape.num_kv_blocks,
            slo.kept_all(served),
            slo.strain(served),
        )

    alone = replica.serve(compressed(trace[:FEW], 1e-3))
    if slo.kept_all(alone) < slo.share:
        worst = min(slo.kept(alone).items(), key=lambda pair: pair[1])
        raise ConfigError(
            f"a request alone misses {worst[0]} (kept by {100 * worst[1]:.0f} % of a few)"
        )
    most = min(MAX_REPLICAS, len(trace))
    low, high, best = 0, 1, option(1)
    while best.kept < slo.share:
        if high >= most:
            raise ConfigError(f"{most} such servers keep the limits for {100 * best.kept:.1f} %")
        low, high = high, min(2 * high, most)
        best = option(high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = option(middle)
        if tried.kept >= slo.share:
            high, best = middle, tried
        else:
            low = middle
    return best


def _loads(
    replica: Replica, best: Option, trace: Sequence[TraceRequest], slo: SLO, rate: float
) -> Iterator[Load]:
    for factor in LOADS:
        kept = slo.kept_all(replica.serve(compressed(trace, factor), best.replicas))
        yield Load(rate * factor, kept, kept * rate * factor)


def _what_breaks(replica: Replica, best: Option, trace: Sequence[TraceRequest], slo: SLO) -> str:
    served = replica.serve(compressed(trace, 2.0), best.replicas)
    missed = {name: kept for name, kept in slo.kept(served).items() if kept < slo.share}
    if not missed:
        return "nothing: all limits are kept"
    name = min(missed, key=lambda metric: missed[metric])
    return f"{name}: {METRICS[name]} is kept by {100 * missed[name]:.1f} %; {_cause(served)}"


def _cause(served: Served) -> str:
    if served.num_preempted > 0.05 * len(served.arrival_s):
        return f"the KV cache is full ({served.num_preempted} preemptions): give it more memory"
    span = float(served.finished_s.max() - served.arrival_s.min())
    if served.busy_s > BUSY * span:
        return "the device is always busy: requests wait for their turn"
    return f"steps hold {served.mean_running:.0f} sequences and take longer"


def _shown(shape: SystemShape) -> dict[str, Any]:
    names = (
        "block_size", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy",
        "enable_prefix_caching",
    )  # fmt: skip
    return {name: getattr(shape, name) for name in names}
