"""Small simulated systems and traces for tests."""

from __future__ import annotations

from typing import Any

from quire.simulator import StepCost, SystemShape, device_named
from quire.simulator.models import model_spec
from quire.simulator.system import BuiltSystem, build_core
from quire.simulator.workloads import TraceRequest, draw_trace

COST = StepCost(device_named("a100-40"), model_spec("opt-13b"))
CONTIGUOUS = StepCost(device_named("a100-40"), model_spec("opt-13b"), block_size=None)


def system(num_tokens: int = 15_700, seed: int = 0, **changes: Any) -> BuiltSystem:
    """OPT-13B on an A100 with so many KV slots."""
    block_size = changes.get("block_size", 16)
    shape = SystemShape(num_kv_blocks=num_tokens // block_size, **changes)
    cost = StepCost(COST.device, COST.spec, block_size=block_size)
    return build_core(cost, shape, seed)


def sharegpt(rate: float, seconds: float, seed: int = 0, **changes: Any) -> list[TraceRequest]:
    return draw_trace(
        "sharegpt", rate=rate, seconds=seconds, seed=seed, max_model_len=2048, **changes
    )
