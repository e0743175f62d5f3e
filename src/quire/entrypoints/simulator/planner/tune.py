"""Settings that serve a workload best on given devices, found by trying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from quire.entrypoints.simulator.planner.capacity import Option, Replica
from quire.entrypoints.simulator.planner.slo import SLO
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.system import SystemShape
from quire.entrypoints.simulator.workloads.trace import TraceRequest

__all__ = ["MAX_TRIALS", "Tuned", "tune"]

MAX_TRIALS = 64
BUDGETS = (512, 1024, 2048, 4096)
SEQUENCES = (32, 64, 128, 256)
POLICIES = ("fcfs", "two_level")
CACHING = (False, True)
TRIED_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class Tuned:
    """settings: values by name. kept, strain: see `SLO`; strain_before: strain of the settings
    before. trials: number of settings that were simulated."""

    settings: dict[str, Any]
    kept: float
    strain: float
    strain_before: float
    trials: int

    @property
    def flags(self) -> str:
        """For `quire serve`."""
        parts: list[str] = []
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                parts.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                parts.append(f"--{flag} {value}")
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "flags": self.flags}


def tune(
    trace: Sequence[TraceRequest],
    slo: SLO,
    cost: StepCost,
    settings: Mapping[str, Any],
    option: Option,
) -> Tuned:
    """Try settings on the devices of an option, and return those with the most room below the
    limits; of equal ones the first. settings: values by name in `SystemShape`, to begin with."""
    shape = SystemShape(num_kv_blocks=option.num_kv_blocks, **settings)
    trace = list(trace[: TRIED_REQUESTS * option.replicas])

    def strain_of(tried: SystemShape) -> tuple[float, float]:
        served = Replica(cost, tried).serve(trace, option.replicas)
        return slo.strain(served), slo.kept_all(served)

    before = strain_of(shape)
    best, (strain, kept), trials = shape, before, 1
    grid = list(product(CACHING, POLICIES, SEQUENCES, BUDGETS))
    for caching, policy, sequences, budget in grid[: MAX_TRIALS - 1]:
        tried = replace(
            shape,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            max_num_seqs=sequences,
            max_num_batched_tokens=budget,
        )
        found = strain_of(tried)
        trials += 1
        if found[0] < strain:
            best, (strain, kept) = tried, found
    names = (
        "max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "enable_prefix_caching",
    )  # fmt: skip
    chosen = {name: getattr(best, name) for name in names}
    return Tuned(chosen, kept, strain, before[0], trials)
