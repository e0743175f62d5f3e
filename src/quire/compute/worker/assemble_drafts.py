"""Parts of a worker that guess tokens, over the rows of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from quire.compute.attention import AttentionBackend, KVPool
from quire.compute.layers import TokenColumns
from quire.compute.models.heads import MedusaHeads
from quire.compute.runner import RowTable
from quire.compute.runner.drafting.blocks import DraftBlocks
from quire.compute.runner.drafting.medusa import MedusaDrafter
from quire.compute.runner.drafting.model import DraftEntries, ModelDrafter
from quire.compute.runner.drafting.state_layer import StateDrafter
from quire.compute.runner.drafting.states import KeptStates, LastStates, StatePages
from quire.compute.runner.drafting.tokens import DraftDraws, StepDrafter
from quire.compute.runner.graphs.mixed import MixedSteps
from quire.compute.runner.graphs.sized import SizedGraph
from quire.compute.runner.inputs import InputGatherer, ModelInputs
from quire.compute.runner.kernel_rows import KernelRows
from quire.compute.runner.rows import ScheduledRows
from quire.compute.sampling import SamplingState
from quire.compute.worker.assembly import PoolSize
from quire.compute.worker.load import LoadedModel
from quire.compute.worker.load_heads import LoadedLayer
from quire.compute.worker.settings import WorkerSettings
from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import capture_bytes
from quire.config.speculation.draft_model import DraftModel
from quire.config.speculation.heads import DraftHeads
from quire.ops import OpSet
from quire.ops.native.capture import CaptureArena

__all__ = ["make_drafter"]


def make_drafter(
    loaded: LoadedModel,
    settings: WorkerSettings,
    size: PoolSize,
    rows: RowTable,
    sampling: SamplingState,
) -> tuple[KeptStates | None, StepDrafter | None]:
    """Return what makes drafts for the rows of a model, and the states of it that are kept for
    that; None for both if nothing does."""
    draw = DraftDraws(sampling, loaded.ops.draw)
    if isinstance(loaded.heads, MedusaHeads):
        assert isinstance(settings.draft, DraftHeads)
        dtype: torch.dtype = getattr(torch, settings.chosen.dtype)
        states = LastStates(rows, loaded.spec.hidden_size, settings.draft.num_drafts, dtype)
        return states, MedusaDrafter(loaded.heads, rows, states, draw)
    if loaded.heads is not None:
        return _layer(loaded, loaded.heads, settings, size, rows, draw)
    if loaded.draft is not None and isinstance(settings.draft, DraftModel):
        of_draft = settings.of_draft(settings.draft)
        return None, _model(loaded.draft, of_draft, settings, size, rows, draw)
    return None, None


def _layer(
    loaded: LoadedModel,
    layer: LoadedLayer,
    settings: WorkerSettings,
    size: PoolSize,
    rows: RowTable,
    draw: DraftDraws,
) -> tuple[KeptStates, StepDrafter]:
    dtype: torch.dtype = getattr(torch, settings.chosen.dtype)
    group, block_size = _group(settings.layout), layer.layout.block_size
    width, taps = layer.state_width, loaded.taps
    states = StatePages(rows, group, block_size, size.num_blocks, width, dtype, taps)
    of_kv = (layer.layout, dtype, loaded.device)
    entries, inputs = _parts(rows, group, size, of_kv, layer.backends, loaded.ops, layer.columns)

    def build(scheduled: ScheduledRows) -> ModelInputs:
        num_tokens, num_rows = int(scheduled.num_tokens.sum()), len(scheduled.slots)
        return inputs.fill(scheduled, inputs.buffers(num_tokens, num_rows, empty=True))

    drafter = StateDrafter(
        layer.head,
        entries,
        build,
        draw,
        settings.chosen.max_num_batched_tokens,
        states,
        loaded.collectives,
    )
    return states, drafter


def _model(
    draft: LoadedModel,
    of_draft: WorkerSettings,
    settings: WorkerSettings,
    size: PoolSize,
    rows: RowTable,
    draw: DraftDraws,
) -> StepDrafter:
    """of_draft: settings of the draft model."""
    of_kv = (of_draft.layout, draft.kv_dtype, draft.device)
    entries, inputs = _parts(
        rows,
        _group(settings.layout),
        size,
        of_kv,
        draft.attention.backends,
        draft.ops,
        draft.columns,
    )
    most, max_rows = settings.chosen.max_num_batched_tokens, settings.chosen.max_num_seqs
    graph = arena = None
    if size.max_captured_rows:
        arena = CaptureArena(capture_bytes(draft.spec, 0, most))
        graph = SizedGraph.captured(draft.model, inputs, draft.team, arena, most, max_rows)
    steps = MixedSteps(draft.model, inputs, graph, draft.given, arena)
    images = settings.spec.images
    media_token = 0 if images is None else images.token_id
    return ModelDrafter(steps, entries, draw, most, draft.spec.vocab_size, media_token)


def _group(layout: KVLayout) -> int:
    """Return the group whose blocks those of the drafter accompany."""
    return next(i for i, each in enumerate(layout.groups) if each.window is None)


def _parts(
    rows: RowTable,
    group: int,
    size: PoolSize,
    of_kv: tuple[KVLayout, torch.dtype, torch.device],
    backends: Sequence[AttentionBackend],
    ops: OpSet,
    columns: TokenColumns,
) -> tuple[DraftEntries, InputGatherer]:
    """Return the entries of a pool of K/V, and inputs over it. group: layer
    group of the rows' block tables. of_kv: layout, dtype and device of the pool."""
    layout, dtype, device = of_kv
    kv = KVPool.allocate(layout, size.num_blocks, dtype, device)
    num_computed = np.zeros(len(rows.num_tokens), np.int64)
    of_rows = KernelRows.of_host(rows)
    kernel_rows = replace(
        of_rows, num_computed=torch.from_numpy(num_computed), tables=(of_rows.tables[group],)
    )
    inputs = InputGatherer(
        kernel_rows,
        kernel_rows.send,
        kv,
        backends,
        layout.groups,
        ops.decode_inputs,
        ops.step_inputs,
        columns,
    )
    blocks = DraftBlocks(
        rows, group, layout.block_size, size.num_blocks, partial(ops.copy_blocks, kv.pages)
    )
    return DraftEntries(rows, blocks, num_computed), inputs
