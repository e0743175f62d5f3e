"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from quire.config import ModelSpec
from quire.config.kv_layout import KVLayout
from quire.config.resolved import ResolvedSettings
from quire.models import LoadFormat
from quire.platform import Platform

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings, the model that they name, and the kernels that were chosen for it.

    chosen: its `max_model_len` is the longest that `Worker.allocate` may be asked for.
    device_state: rows live on the device and steps are launched ahead; else on the host.
    forced_ops: op name → provider. attention_backend: the one to take. preferred_attention: the
    backend to take if it serves and none is forced. max_captured_rows: of decode steps that are
    captured, 0 for none.
    """

    chosen: ResolvedSettings
    spec: ModelSpec
    folder: Path
    layout: KVLayout
    platform: Platform
    device_state: bool
    forced_ops: dict[str, str]
    attention_backend: str | None
    preferred_attention: str | None
    max_captured_rows: int

    @property
    def load_format(self) -> LoadFormat:
        return cast("LoadFormat", self.chosen.load_format)  # `EngineSettings` checks it
