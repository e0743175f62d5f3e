"""The second half of a worker's start: the KV pool, the rows, and the runner over them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from quire.compute.attention import KVPool
from quire.compute.kv_transfer.block_copies import DirectCopies
from quire.compute.kv_transfer.pool_memory import PoolMemory
from quire.compute.kv_transfer.tiers import make_tiers
from quire.compute.runner import RowTable
from quire.compute.runner.changes import PlanChanges
from quire.compute.runner.device.queue import HostQueue
from quire.compute.runner.drafting.states import KeptStates
from quire.compute.runner.draws import Draws, GraphDraws, PartDraws
from quire.compute.runner.forward import AskedPrompts, ForwardPass
from quire.compute.runner.graphs.decode import DecodeGraph, DecodeSteps
from quire.compute.runner.graphs.ladder import LazyGraphs
from quire.compute.runner.graphs.mixed import MixedSteps
from quire.compute.runner.graphs.recorder import NativeRecorder
from quire.compute.runner.graphs.sized import SizedGraph
from quire.compute.runner.inputs import InputGatherer
from quire.compute.runner.kernel_rows import KernelRows
from quire.compute.runner.launch import Runner
from quire.compute.runner.media import MediaStore
from quire.compute.runner.states import RecurrentStates
from quire.compute.sampling import Sampler, SamplingState
from quire.compute.worker.assemble_device import assemble_on_device
from quire.compute.worker.assemble_drafts import make_drafter
from quire.compute.worker.assembly import Assembly, PoolSize
from quire.compute.worker.load import LoadedModel
from quire.compute.worker.settings import WorkerSettings
from quire.config.memory.plan import capture_bytes, capture_table_bytes
from quire.config.shard import NUM_PIECES
from quire.ops.exchange import NativeCollectives
from quire.ops.native.capture import CaptureArena

__all__ = ["Assembly", "PoolSize", "assemble"]

CACHE_LINE = 64


def assemble(
    loaded: LoadedModel, settings: WorkerSettings, size: PoolSize, media: MediaStore
) -> Assembly:
    """Allocate what steps need beside the model. media: embeddings that requests bring."""
    build = assemble_on_device if settings.device_state else _on_host
    return build(loaded, settings, size, media)


def _on_host(
    loaded: LoadedModel, settings: WorkerSettings, size: PoolSize, media: MediaStore
) -> Assembly:
    """Rows on the host, where the model computes too."""
    ops, layout = loaded.ops, settings.layout
    kv = KVPool.allocate(layout, size.num_blocks, loaded.kv_dtype, loaded.device)
    kv = kv.scaled(loaded.cache_scales)
    rows = RowTable(
        settings.chosen.max_num_seqs,
        size.max_model_len,
        [g.tokens_per_block for g in layout.groups],
        position_axes=loaded.spec.position_axes,
        token_types=loaded.spec.token_types,
        has_states=loaded.recurrent is not None,
    )
    states = None
    if loaded.recurrent is not None:
        num_checkpoints = settings.chosen.num_state_checkpoints
        states = RecurrentStates(rows, num_checkpoints, loaded.recurrent)
    sampling = SamplingState(
        settings.chosen.max_num_seqs, loaded.spec.vocab_size, settings.chosen.logprobs_mode
    )
    tiers = make_tiers(DirectCopies(kv.pages, size.num_host_blocks, ops.swap_blocks))
    changes = PlanChanges(
        rows,
        sampling,
        kv.pages,
        tiers,
        ops.copy_blocks,
        torch.from_numpy,
        whole_prompts=loaded.whole_prompts,
        states=states,
    )
    kernel_rows = KernelRows.of_host(rows)
    inputs = InputGatherer(
        kernel_rows,
        kernel_rows.send,
        kv,
        loaded.attention.backends,
        layout.groups,
        ops.decode_inputs,
        ops.step_inputs,
        loaded.columns,
        whole_prompts=loaded.whole_prompts,
        position_axes=loaded.spec.position_axes,
        values=rows.values,
        states=states,
    )
    kept, drafter = make_drafter(loaded, settings, size, rows, sampling)
    captured = _captured_sizes(settings, size)
    arena = _make_arena(loaded, settings, size, kept)
    graph_draws = _make_draws(loaded, sampling, kernel_rows)
    sampler = Sampler(sampling, ops.draw, ops.token_logprobs)
    shared = (loaded.model, inputs, loaded.team, arena, captured.tokens)
    shared = (*shared, settings.chosen.max_num_seqs, loaded.taps)
    forward = MixedSteps(
        loaded.model,
        inputs,
        SizedGraph.captured(*shared) if captured.tokens else None,
        loaded.given,
        arena if captured.tokens else None,
        has_ranks=loaded.collectives.size > 1,
    )
    runner = Runner(
        rows,
        changes,
        _decode_steps(loaded, captured.rows, inputs, kernel_rows, graph_draws, arena, kept),
        ForwardPass(
            forward,
            rows,
            forward.build,
            torch.from_numpy,
            AskedPrompts(changes.num_prompt_logprobs, ops.token_logprobs),
            media,
            loaded.columns,
            loaded.collectives,
            kept,
            loaded.classify,
        ),
        Draws(sampling, rows, sampler, graph_draws, torch.from_numpy),
        HostQueue(),
        drafter=drafter,
        collectives=loaded.collectives,
    )
    memory = PoolMemory(kv.pages, None if states is None else states.checkpoints)
    return Assembly(runner, memory, tiers, nullcontext)


@dataclass(frozen=True, slots=True)
class _CapturedSizes:
    """Most rows of a captured decode step, and most tokens of a captured mixed step; 0 for none."""

    rows: int
    tokens: int


def _captured_sizes(settings: WorkerSettings, size: PoolSize) -> _CapturedSizes:
    rows = min(size.max_captured_rows, settings.chosen.max_num_seqs)
    return _CapturedSizes(rows, settings.chosen.max_num_batched_tokens if rows else 0)


def _make_arena(
    loaded: LoadedModel, settings: WorkerSettings, size: PoolSize, kept: KeptStates | None
) -> CaptureArena:
    """Return memory for the tensors of all captured steps. kept: states that they hold."""
    captured = _captured_sizes(settings, size)
    return CaptureArena(
        capture_bytes(loaded.spec, captured.rows, captured.tokens)
        + capture_table_bytes(settings.layout, captured.rows, size.max_model_len)
        + _kept_bytes(loaded, kept, captured.rows, captured.tokens)
        + (_tree_bytes(loaded, captured.tokens) if settings.chosen.rank_invariant else 0)
    )


def _make_draws(
    loaded: LoadedModel, sampling: SamplingState, kernel_rows: KernelRows
) -> GraphDraws:
    """Return draws within graphs; ranks with parts of the logits draw together."""
    parts, collectives = loaded.parts, loaded.collectives
    of_parts = None
    if isinstance(collectives, NativeCollectives) and collectives.size > 1 and parts.total:
        of_parts = PartDraws(partial(collectives.draw, parts.own, parts.total), parts)
    return GraphDraws(
        sampling,
        kernel_rows,
        loaded.ops.draw,
        loaded.ops.append_tokens,
        of_parts=of_parts,
        read_logprobs=loaded.ops.token_logprobs,
    )


def _decode_steps(
    loaded: LoadedModel,
    max_rows: int,
    inputs: InputGatherer,
    kernel_rows: KernelRows,
    draws: GraphDraws,
    arena: CaptureArena,
    kept: KeptStates | None,
) -> DecodeSteps:
    """Return decode steps with a graph for each number of rows up to `max_rows`."""
    sizes, collectives = tuple(range(1, max_rows + 1)), loaded.collectives

    def graphs(name: str) -> LazyGraphs[DecodeGraph]:
        return LazyGraphs(sizes, 0, 0, name, collectives)

    return DecodeSteps(
        loaded.model,
        inputs,
        kernel_rows.slots,
        draws,
        graphs(""),
        graphs("decode steps"),
        NativeRecorder(loaded.team, arena),
        has_spare_row=False,
        collectives=collectives,
        kept=kept,
    )


def _tree_bytes(loaded: LoadedModel, max_tokens: int) -> int:
    """Return the bytes of sums that wait for others: one for each level of the tree, and the one
    that is being made."""
    levels = NUM_PIECES.bit_length() + 1
    return levels * (max_tokens * loaded.spec.hidden_size * torch.float32.itemsize + CACHE_LINE)


def _kept_bytes(
    loaded: LoadedModel, kept: KeptStates | None, max_rows: int, max_tokens: int
) -> int:
    """Return the bytes of states that a captured step holds until its end."""
    if kept is None:
        return 0
    spec, taps = loaded.spec, loaded.taps
    num_states = max_rows if taps is None else len(taps.layers) * max(max_rows, max_tokens)
    return num_states * (spec.hidden_size * spec.dtype_bytes + CACHE_LINE)
