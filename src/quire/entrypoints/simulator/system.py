"""One simulated server: the real engine core, scheduler and block manager over the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import ModelSpec
from quire.config.resolved import ResolvedScheduler
from quire.engine.core.engine_core import EngineCore
from quire.entrypoints.simulator.executor import SimulatedExecutor, VirtualClock
from quire.entrypoints.simulator.step_cost import StepCost
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Feasibility, Scheduler, make_policy
from quire.protocol.control import MeasureRecovery
from quire.protocol.recovery import ALWAYS_SWAP, RecoveryCosts

__all__ = ["BuiltSystem", "SystemShape", "build_core", "layout_of"]


@dataclass(frozen=True, slots=True)
class SystemShape:
    """Settings of a simulated server, by the names of the engine's. depth: steps in flight.
    preemption_mode: "recompute", "swap" or "auto"."""

    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    max_model_len: int = 2048
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = False
    num_host_blocks: int = 0
    preemption_mode: str = "recompute"
    long_prefill_token_threshold: int | None = None
    depth: int = 2


@dataclass(frozen=True, slots=True)
class BuiltSystem:
    """A core and the parts of it that a simulation looks at."""

    core: EngineCore
    scheduler: Scheduler
    executor: SimulatedExecutor
    clock: VirtualClock


def layout_of(spec: ModelSpec, block_size: int, kv_dtype: str | None = None) -> KVLayout:
    """Return the layout of a model's cache. kv_dtype: None as in the dtype of the model."""
    return KVLayout.of_model(spec, block_size, kv_dtype or spec.dtype)


def build_core(cost: StepCost, shape: SystemShape, seed: int = 0) -> BuiltSystem:
    """Wire a server of its own, at second 0. ConfigError if its pool cannot hold one sequence."""
    layout, clock = layout_of(cost.spec, shape.block_size), VirtualClock()
    if layout.most_blocks(2, shape.max_num_batched_tokens) > shape.num_kv_blocks:
        raise ConfigError(
            f"{shape.num_kv_blocks} KV blocks hold no sequence at all: take more or larger devices"
        )
    executor = SimulatedExecutor(cost, clock, max_num_seqs=shape.max_num_seqs, seed=seed)
    settings = ResolvedScheduler(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        scheduling_policy=shape.scheduling_policy,
        long_prefill_token_threshold=shape.long_prefill_token_threshold,
    )
    scheduler = Scheduler(
        kv=KVManager(
            layout,
            shape.num_kv_blocks,
            shape.max_num_seqs,
            shape.max_model_len,
            shape.num_host_blocks,
        ),
        hasher=BlockHasher(shape.block_size, b"simulator"),
        policy=make_policy(settings),
        feasibility=Feasibility(
            layout,
            shape.num_kv_blocks,
            shape.max_num_seqs,
            shape.max_num_batched_tokens,
            shape.max_model_len,
        ),
        settings=settings,
        max_model_len=shape.max_model_len,
        enable_prefix_caching=shape.enable_prefix_caching,
        recovery_costs=_recovery(executor, shape.preemption_mode),
        vocab_size=cost.spec.vocab_size,
    )
    core = EngineCore(scheduler, executor, shape.depth, report=executor.start())
    return BuiltSystem(core, scheduler, executor, clock)


def _recovery(executor: SimulatedExecutor, mode: str) -> RecoveryCosts | None:
    if mode == "swap":
        return ALWAYS_SWAP
    return executor.control(MeasureRecovery()).recovery_costs if mode == "auto" else None
