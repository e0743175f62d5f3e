"""What a worker is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config import ModelSpec
from quire.config.kv_layout import KVLayout
from quire.models import LoadFormat
from quire.platform import Platform

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know. forced_ops: op name → provider. preferred_attention: the backend
    to take if it serves and none is forced. num_threads: that compute.
    max_model_len: the longest that `Worker.allocate` may be asked for. device_state: rows live on
    the device and steps are launched ahead; else on the host. max_captured_rows: of decode steps
    that are captured, 0 for none. torch_compile: norms, activations and sums by torch's compiler.
    dtype, kv_dtype: names of torch dtypes. quantization: of the matrices, as in `EngineSettings`.
    """

    spec: ModelSpec
    folder: Path
    layout: KVLayout
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
    preferred_attention: str | None
    num_threads: int
    max_captured_rows: int
    torch_compile: bool
    show_progress: bool
