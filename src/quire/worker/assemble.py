"""The second half of a worker's start: the KV pool, the rows, and the runner over them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from quire.attention import KVPool
from quire.config.memory.plan import capture_bytes, capture_table_bytes
from quire.ops.capture import CaptureArena
from quire.runner import RowTable
from quire.runner.block_copies import DirectCopies
from quire.runner.captured import CapturedSteps
from quire.runner.captured_draws import CapturedDraws
from quire.runner.captured_forward import CapturedForward
from quire.runner.changes import PlanChanges
from quire.runner.decode_inputs import DecodeInputs, RowTensors
from quire.runner.forward import ForwardPass
from quire.runner.host_draws import HostDraws
from quire.runner.host_pages import HostPages
from quire.runner.inputs import InputBuilder
from quire.runner.runner import ModelRunner
from quire.sampling import SamplingState
from quire.worker.assemble_device import assemble_on_device
from quire.worker.assembly import Assembly, PoolSize
from quire.worker.load import LoadedModel
from quire.worker.settings import WorkerSettings

__all__ = ["Assembly", "PoolSize", "assemble"]


def assemble(loaded: LoadedModel, settings: WorkerSettings, size: PoolSize) -> Assembly:
    """Allocate what steps need beside the model."""
    build = assemble_on_device if settings.device_state else _on_host
    return build(loaded, settings, size)


def _on_host(loaded: LoadedModel, settings: WorkerSettings, size: PoolSize) -> Assembly:
    """Rows on the host, where the model computes too."""
    ops, layout = loaded.ops, settings.layout
    kv = KVPool.allocate(layout, size.num_blocks, loaded.kv_dtype, loaded.device)
    rows = RowTable(
        settings.max_num_seqs, size.max_model_len, layout.block_size, len(layout.groups)
    )
    sampling = SamplingState(settings.max_num_seqs, loaded.spec.vocab_size)
    host = HostPages(DirectCopies(kv.pages, size.num_host_blocks, ops.swap_blocks))
    changes = PlanChanges(rows, sampling, kv.pages, host, ops.copy_blocks, torch.from_numpy)
    windows = [group.window for group in layout.groups]
    shared = (kv, loaded.attention.backend, windows, layout.block_size)
    inputs = InputBuilder(rows, *shared)
    max_captured = min(size.max_captured_rows, settings.max_num_seqs)
    max_tokens = settings.max_num_batched_tokens if max_captured else 0
    slots = np.zeros(max_captured, np.int64)
    arena = CaptureArena(
        capture_bytes(loaded.spec, max_captured, max_tokens)
        + capture_table_bytes(layout, max_captured, size.max_model_len)
    )
    captured = CapturedSteps(
        loaded.model,
        DecodeInputs(RowTensors.of(rows), torch.from_numpy(slots), *shared, ops.decode_inputs),
        slots,
        CapturedDraws(sampling, rows, slots, ops.draw, ops.append_tokens),
        loaded.team,
        arena,
    )
    forward = CapturedForward(
        loaded.model,
        kv,
        loaded.attention.backend,
        windows,
        loaded.team,
        arena,
        max_tokens=max_tokens,
        max_rows=settings.max_num_seqs,
        max_blocks=rows.tables[0].shape[1],
    )
    runner = ModelRunner(
        rows,
        changes,
        captured,
        ForwardPass(forward, rows, inputs.build, torch.from_numpy, changes.num_prompt_logprobs),
        HostDraws(sampling, rows, ops.draw),
    )
    return Assembly(runner, kv.pages, host, nullcontext)
