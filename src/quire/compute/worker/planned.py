"""Settings of a worker from the plan of a start."""

from __future__ import annotations

from quire.compute.attention import backend_of_isa
from quire.compute.worker.settings import WorkerSettings
from quire.config import env
from quire.config.memory.fixed_bytes import MAX_GRAPH_ROWS
from quire.config.memory.plan import MAX_CAPTURED_ROWS
from quire.config.resolved import ResolvedSettings
from quire.config.shard import Shard
from quire.config.startup import StartupPlan
from quire.ops import REFERENCE, force_gpu_kernels, force_invariance, force_isa, force_linear

__all__ = ["worker_settings"]


def worker_settings(plan: StartupPlan, rank: int = 0) -> WorkerSettings:
    """The settings by which a rank of the model computes. All ranks choose the same kernels."""
    resolved, chosen = plan.resolved, plan.resolved.settings
    forced_ops, forced_attention = _forced_kernels(chosen)
    if chosen.batch_invariant or chosen.rank_invariant:
        forced_ops = force_invariance(resolved.platform, forced_ops)
        if chosen.device != "cpu":
            forced_attention = forced_attention or "triton"
    rows = MAX_GRAPH_ROWS
    if chosen.device == "cpu":  # where only calls of our own kernels can be captured
        rows = 0 if chosen.torch_compile else MAX_CAPTURED_ROWS
    shard = Shard(rank, chosen.tensor_parallel_size)
    return WorkerSettings(
        chosen=chosen,
        spec=resolved.spec,
        folder=plan.folder,
        layout=resolved.layout.of_rank(shard),
        platform=resolved.platform,
        device_state=chosen.device != "cpu",
        forced_ops=forced_ops,
        attention_backend=chosen.attention_backend or forced_attention,
        preferred_attention=backend_of_isa(chosen.attention_isa),
        max_captured_rows=0 if chosen.enforce_eager else rows,
        draft=resolved.draft,
        shard=shard,
    )


def _forced_kernels(chosen: ResolvedSettings) -> tuple[dict[str, str], str | None]:
    """Providers by operation, and the attention backend, that a variable of the environment forces
    on the device; else the product that was chosen for a CPU."""
    if chosen.device == "cpu":
        isa = env.cpu_isa()
        if isa is None:
            return force_linear(chosen.linear_isa, chosen.activation_bits), None
        return force_isa(isa), backend_of_isa(isa)
    wish = env.gpu_kernels()
    return force_gpu_kernels(wish), REFERENCE if wish == "none" else wish
