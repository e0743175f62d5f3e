"""One of several equal servers that share a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.simulator.run import Served, serve
from quire.simulator.step_cost import StepCost
from quire.simulator.system import SystemShape, build_core
from quire.simulator.workloads.trace import TraceRequest, engine_requests, longest

__all__ = ["Replica", "compressed"]


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
