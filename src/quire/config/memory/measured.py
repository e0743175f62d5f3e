"""The memory plan of a GPU, made again from measurements after the model was loaded."""

from __future__ import annotations

from dataclasses import replace

from quire.config.memory.amounts import format_bytes
from quire.config.memory.budget import device_budget
from quire.config.memory.plan import FixedBytes
from quire.config.memory.pool_size import PoolBounds, PoolSizing
from quire.config.resolve import Decision, Resolved
from quire.config.settings import EngineSettings
from quire.protocol.control import MeasuredMemory

__all__ = ["render_measured", "replan"]


def replan(asked: EngineSettings, planned: Resolved, measured: MeasuredMemory) -> Resolved:
    """Return the plan with measured sizes in place of predicted ones: another number of KV blocks,
    and a shorter context if the predicted one does not fit after all.

    asked: settings that `planned` was resolved from. Raises ConfigError as `resolve` does.
    """
    chosen, predicted = planned.settings, planned.memory.fixed
    fixed = FixedBytes(
        weights=measured.weights,
        runtime=measured.loaded - measured.weights,
        activations=measured.peak - measured.loaded,
        logits=0,
        tables=0,
        graphs=predicted.graphs,
        images=predicted.images,
    )
    sizing = PoolSizing(
        asked,
        planned.spec,
        planned.layout,
        fixed=lambda context: fixed,  # noqa: ARG005  tables were made for the longest one
        budget=device_budget(asked, measured.total, measured.free),
        bounds=PoolBounds(chosen.max_num_seqs, chosen.max_num_batched_tokens, chosen.max_model_len),
    )
    context, context_reason = sizing.choose_context()
    num_blocks, blocks_reason = sizing.choose_blocks(context)
    made = {
        "max_model_len": Decision("max_model_len", f"{context:,}", context_reason),
        "num_kv_blocks": Decision("num_kv_blocks", f"{num_blocks:,}", blocks_reason),
    }
    if context == chosen.max_model_len:
        del made["max_model_len"]
    return replace(
        planned,
        settings=replace(chosen, max_model_len=context, num_kv_blocks=num_blocks),
        memory=sizing.plan(context, num_blocks),
        decisions=tuple(made.get(each.name, each) for each in planned.decisions),
    )


def render_measured(planned: Resolved, settled: Resolved) -> str:
    """Return a line for the start-up report: the measurement, and its consequence."""
    fixed, memory = settled.memory.fixed, settled.memory
    text = (
        f"measured: weights {format_bytes(fixed.weights)}, process {format_bytes(fixed.runtime)}, "
        f"a step of {settled.settings.max_num_batched_tokens:,} tokens "
        f"{format_bytes(fixed.activations)}, held back for graphs {format_bytes(fixed.graphs)}; "
        f"KV cache {format_bytes(memory.kv_cache)}, {memory.capacity_tokens:,} tokens"
    )
    if planned.settings.max_model_len == settled.settings.max_model_len:
        return text
    return (
        f"{text}; max_model_len {settled.settings.max_model_len:,}, since "
        f"{planned.settings.max_model_len:,} do not fit"
    )
