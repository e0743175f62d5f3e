"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from quire.base.platform import Platform
from quire.base.platform.shared_region import SharedRegion
from quire.compute.models import LoadFormat
from quire.config import ModelSpec
from quire.config.kv_layout import KVLayout
from quire.config.resolved import ResolvedSettings
from quire.config.shard import ONE_RANK, Shard
from quire.config.speculation.draft_model import Draft, DraftModel
from quire.ops.distributed.gloo import GlooMeeting

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings, the model that they name, and the kernels that were chosen for it.

    chosen: its `max_model_len` is the longest that `Worker.allocate` may be asked for.
    device_state: rows live on the device and steps are launched ahead; else on the host.
    forced_ops: op name → provider. attention_backend: the backend to take. preferred_attention: the
    backend to take if it serves and none is forced. max_captured_rows: most rows of a captured
    decode step; 0 captures none. draft: weights that guess tokens. shard: part of the model that
    this worker has; `layout` covers only this part. meeting: place where the ranks meet; None for
    one alone.
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
    draft: Draft | None = None
    shard: Shard = ONE_RANK
    meeting: SharedRegion | GlooMeeting | None = None

    @property
    def load_format(self) -> LoadFormat:
        return cast("LoadFormat", self.chosen.load_format)  # `EngineSettings` checks it

    def of_draft(self, draft: DraftModel) -> WorkerSettings:
        """The settings by which the draft model is loaded, over blocks of the same numbers. No bit
        of an answer depends on its guesses, so that it multiplies as fast as it can."""
        dtype = draft.spec.dtype
        own: dict[str, object] = {
            "kv_cache_dtype": dtype,
            "enable_lora": False,
            "batch_invariant": False,
            "activation_bits": 8,
        }
        return replace(
            self,
            chosen=replace(self.chosen, **own),
            spec=draft.spec,
            folder=draft.folder,
            layout=KVLayout.of_draft(draft.spec, self.layout),
            draft=None,
            shard=ONE_RANK,
            meeting=None,
        )
