"""One process, one device: the model, its KV pool and the runner over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from quire.attention import AttentionNeeds, BackendChoice, KVPool, select_backend
from quire.config import ModelSpec
from quire.config.kv_layout import KVLayout
from quire.config.memory_plan import capture_bytes, capture_table_bytes
from quire.layers import LayerFactory
from quire.models import LoadFormat, load_model
from quire.ops import REFERENCE, OpSet, Team, build_op_set
from quire.ops.capture import CaptureArena
from quire.platform import Platform
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.step import StepPlan, StepResult
from quire.quantization import QuantizedFormats
from quire.runner import RowTable
from quire.runner.captured import CapturedSteps
from quire.runner.changes import PlanChanges
from quire.runner.decode_inputs import DecodeInputs, RowTensors
from quire.runner.forward import ForwardPass
from quire.runner.host_draws import HostDraws
from quire.runner.host_pages import HostPages
from quire.runner.inputs import InputBuilder
from quire.runner.pending import PendingStep
from quire.runner.runner import ModelRunner
from quire.sampling import SamplingState
from quire.worker.recovery import measure_recovery

__all__ = ["Worker", "WorkerSettings"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know. forced_ops: op name → provider. num_threads: that compute.
    max_captured_rows: of decode steps that are captured, 0 for none. device_state: rows live on the
    device and steps are launched ahead; else on the host.
    dtype, kv_dtype: names of torch dtypes. quantization: of the matrices, as in `EngineSettings`.
    """

    spec: ModelSpec
    folder: Path
    layout: KVLayout
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str
    quantization: str | None
    kv_dtype: str
    load_format: LoadFormat
    seed: int
    platform: Platform
    device_state: bool
    forced_ops: dict[str, str]
    attention_backend: str | None
    num_threads: int
    max_captured_rows: int
    show_progress: bool


class Worker:
    """Loads on construction. Raises ConfigError if the model cannot be loaded as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        team = Team(settings.num_threads)
        device = torch.device(settings.platform.device)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        kv_dtype: torch.dtype = getattr(torch, settings.kv_dtype)
        spec = replace(settings.spec, dtype=settings.dtype)
        ops = build_op_set(settings.platform, settings.forced_ops, team)
        needs = AttentionNeeds(
            dtype, kv_dtype, spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.score_options
        )
        choice = select_backend(settings.platform, needs, settings.attention_backend, team)
        formats = QuantizedFormats(settings.quantization, ops)
        factory = LayerFactory(ops, choice.backend, dtype, device, settings.max_model_len, formats)
        with torch.inference_mode():
            model = load_model(
                spec,
                settings.folder,
                factory,
                settings.load_format,
                settings.seed,
                settings.show_progress,
            )
        if ops.chosen["linear"] != REFERENCE:
            torch.set_num_threads(1)  # the team computes; torch's own threads have only loaded
        layout = settings.layout
        kv = KVPool.allocate(layout, settings.num_blocks, kv_dtype, device)
        rows = RowTable(
            settings.max_num_seqs, settings.max_model_len, layout.block_size, len(layout.groups)
        )
        sampling = SamplingState(settings.max_num_seqs, spec.vocab_size)
        self._host = HostPages(kv.pages, settings.num_host_blocks, ops.swap_blocks)
        changes = PlanChanges(
            rows, sampling, kv.pages, self._host, ops.copy_blocks, torch.from_numpy
        )
        windows = [group.window for group in layout.groups]
        shared = (kv, choice.backend, windows, layout.block_size)
        inputs = InputBuilder(rows, *shared)
        max_captured = min(settings.max_captured_rows, settings.max_num_seqs)
        slots = np.zeros(max_captured, np.int64)
        captured = CapturedSteps(
            model,
            DecodeInputs(RowTensors.of(rows), torch.from_numpy(slots), *shared, ops.decode_inputs),
            slots,
            team,
            CaptureArena(
                capture_bytes(spec, max_captured)
                + capture_table_bytes(layout, max_captured, settings.max_model_len)
            ),
        )
        self.providers = _describe(choice, ops)
        self._settings = settings
        self._runner = ModelRunner(
            rows,
            changes,
            captured,
            ForwardPass(model, rows, inputs.build, torch.from_numpy, changes.num_prompt_logprobs),
            HostDraws(sampling, rows, ops.draw),
        )

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; see `Runner.launch`."""
        return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        return self._runner.launch(plan).result()

    def measure_recovery(self) -> RecoveryCosts:
        """What it costs to bring a preempted request back, before any request is served."""
        chosen = self._settings
        return measure_recovery(
            self.execute,
            self._host.copy_out,
            num_groups=len(chosen.layout.groups),
            block_size=chosen.layout.block_size,
            num_blocks=chosen.num_blocks,
            num_host_blocks=chosen.num_host_blocks,
            longest_step=min(chosen.max_num_batched_tokens, chosen.max_model_len - 1),
        )


def _describe(choice: BackendChoice, ops: OpSet) -> str:
    """A sentence on what computes: "attention: cpu_avx512 (…); rms_norm, linear by …"."""
    by_provider: dict[str, list[str]] = {}
    for op, provider in ops.chosen.items():
        if op != "paged_attention":
            by_provider.setdefault(provider, []).append(op)
    others = "; ".join(f"{', '.join(names)} by {name}" for name, names in by_provider.items())
    return f"{choice.reason.rstrip('.')}; {others}"
