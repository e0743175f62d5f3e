"""A worker whose rows live on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.compute.attention import KVPool
from quire.compute.attention.splittable import SplittableAttention
from quire.compute.kv_transfer.block_copies import StagedCopies
from quire.compute.kv_transfer.copy_lane import lane_of
from quire.compute.kv_transfer.tiers import make_tiers
from quire.compute.runner import RowTable
from quire.compute.runner.changes import PlanChanges
from quire.compute.runner.device.queue import DeviceQueue, queue_of
from quire.compute.runner.device.state import DeviceState
from quire.compute.runner.draws import Draws, GraphDraws
from quire.compute.runner.forward import AskedPrompts, ForwardPass
from quire.compute.runner.graphs.decode import DecodeSteps
from quire.compute.runner.graphs.ladder import LazyGraphs, ladder
from quire.compute.runner.graphs.mixed import MixedSteps
from quire.compute.runner.graphs.pieces import MAX_TOKENS, PieceGraphs
from quire.compute.runner.graphs.recorder import CudaRecorder, GraphRecorder
from quire.compute.runner.inputs import InputGatherer
from quire.compute.runner.launch import Runner
from quire.compute.runner.media import MediaStore
from quire.compute.sampling import DeviceExtras, DeviceSampler, Sampler, SamplingState
from quire.compute.worker.assembly import Assembly, PoolSize
from quire.compute.worker.load import LoadedModel
from quire.compute.worker.settings import WorkerSettings
from quire.ops import ALL_OPS, select

__all__ = ["MakeRecorder", "assemble_on_device"]

MakeRecorder = Callable[[DeviceState, KVPool], GraphRecorder]


def _cuda_recorder(state: DeviceState, kv: KVPool) -> GraphRecorder:  # noqa: ARG001  a test's need
    return CudaRecorder()


def assemble_on_device(
    loaded: LoadedModel,
    settings: WorkerSettings,
    size: PoolSize,
    media: MediaStore,
    queue: DeviceQueue | None = None,
    make_recorder: MakeRecorder | None = None,
) -> Assembly:
    """media: see `assemble`. queue: order in which the device works; a new one if None.
    make_recorder: makes the recorder of graphs; without one, and without CUDA's, steps are computed
    call by call. The pool has one block more than the plan side knows, and the sampling parameters
    one slot more, for the spare row."""
    queue = queue or queue_of(loaded.device)
    with queue.computing():  # what is allocated here is filled in the order of the queue
        return _assemble(loaded, settings, size, media, queue, make_recorder)


def _assemble(
    loaded: LoadedModel,
    settings: WorkerSettings,
    size: PoolSize,
    media: MediaStore,
    queue: DeviceQueue,
    make_recorder: MakeRecorder | None,
) -> Assembly:
    ops, layout, model = loaded.ops, settings.layout, loaded.model
    backends = loaded.attention.backends
    attention = [each for each in backends if isinstance(each, SplittableAttention)]
    assert len(attention) == len(backends), "the model was loaded for rows on the host"
    kv = KVPool.allocate(layout, size.num_blocks + 1, loaded.kv_dtype, loaded.device)
    kv = kv.scaled(loaded.cache_scales)
    rows = RowTable(
        settings.chosen.max_num_seqs,
        size.max_model_len,
        [g.tokens_per_block for g in layout.groups],
        position_axes=loaded.spec.position_axes,
        token_types=loaded.spec.token_types,
    )
    sampling = SamplingState(
        settings.chosen.max_num_seqs + 1, loaded.spec.vocab_size, settings.chosen.logprobs_mode
    )
    tiers = make_tiers(
        StagedCopies(kv.pages, size.num_host_blocks, queue.upload, lane_of(queue.device))
    )
    changes = PlanChanges(
        rows,
        sampling,
        kv.pages,
        tiers,
        ops.copy_blocks,
        queue.upload,
        whole_prompts=loaded.whole_prompts,
    )
    state = DeviceState(rows, sampling, queue, ops.apply_updates, spare_block=size.num_blocks)
    inputs = InputGatherer(
        state.rows,
        state.send,
        kv,
        attention,
        layout.groups,
        ops.decode_inputs,
        ops.step_inputs,
        loaded.columns,
        whole_prompts=loaded.whole_prompts,
        position_axes=loaded.spec.position_axes,
    )
    sampler = DeviceSampler(sampling, state.sampling, ops.draw)
    extras = DeviceExtras(sampling, sampler, ops.edit_logits, ops.token_logprobs, queue.upload)
    graph_draws = GraphDraws(sampling, state.rows, ops.draw, ops.append_tokens, sampler)
    max_rows = min(size.max_captured_rows, settings.chosen.max_num_seqs)
    if make_recorder is None and loaded.device.type == "cuda":
        make_recorder = _cuda_recorder
    recorder = make_recorder(state, kv) if make_recorder is not None and max_rows else None
    is_capturable = recorder is not None and all(each.is_capturable for each in attention)
    sizes = ladder(max_rows) if is_capturable and loaded.spec.draws_tokens else ()
    max_tokens = min(MAX_TOKENS, settings.chosen.max_num_batched_tokens)
    pieces = None
    if recorder is not None:
        pieces = PieceGraphs(model, inputs, attention, LazyGraphs(ladder(max_tokens)), recorder)
    mixed = MixedSteps(model, inputs, pieces, loaded.given)
    host = replace(settings.platform, device="cpu")
    of_host = [select(ALL_OPS[name], host)[1] for name in ("draw", "token_logprobs")]
    runner = Runner(
        rows,
        changes,
        DecodeSteps(
            model,
            inputs,
            state.rows.slots,
            graph_draws,
            LazyGraphs(sizes, name="decode steps"),
            None,
            recorder,
            has_spare_row=True,
        ),
        ForwardPass(
            mixed,
            rows,
            mixed.build,
            queue.upload,
            AskedPrompts(changes.num_prompt_logprobs, of_host[1]),
            media,
            loaded.columns,
            classify=loaded.classify,
        ),
        Draws(
            sampling, rows, Sampler(sampling, *of_host), graph_draws, queue.upload, extras, state
        ),
        queue,
        state,
    )
    return Assembly(runner, None, tiers, queue.computing)
