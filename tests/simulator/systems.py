"""Small simulated systems and traces for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.entrypoints.simulator import StepCost, SystemShape, device_named
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.system import BuiltSystem, build_core
from quire.entrypoints.simulator.workloads import Piece, TraceRequest, draw_trace

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


def crowded_trace(seed: int) -> list[TraceRequest]:
    """310 short requests, more than `crowded_system` serves in their time: some with samples, some
    with beams, half of them behind one of three prefixes."""
    rng = np.random.default_rng(seed)
    trace: list[TraceRequest] = []
    for index in range(310):
        kind = int(rng.integers(4))
        trace.append(
            TraceRequest(
                index * 0.1,
                int(rng.integers(1, 120)),
                int(rng.integers(1, 80)),
                (Piece(int(rng.integers(3)), 48),) if rng.random() < 0.5 else (),
                n=1 if kind < 2 else 3,
                is_search=kind == 3,
            )
        )
    return trace


def crowded_system(seed: int) -> BuiltSystem:
    """A pool so small that groups are preempted and swapped, under a policy by the seed."""
    shape = SystemShape(
        num_kv_blocks=48,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        enable_prefix_caching=True,
        num_host_blocks=64,
        preemption_mode="auto" if seed % 2 else "swap",
        scheduling_policy=("fcfs", "srtf", "two_level")[seed % 3],
    )
    return build_core(COST, shape, seed)
