"""Heads that guess tokens from states of a model, loaded beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention import AttentionBackend, AttentionNeeds, select_backends
from quire.config.kv_layout import KVLayout
from quire.config.speculation.draft_model import Draft
from quire.config.speculation.heads import DraftHeads
from quire.layers import LayerFactory, StateTaps, TokenColumns
from quire.models import CausalLM
from quire.models.heads import EagleHead, MedusaHeads, load_eagle, load_medusa
from quire.models.llama import LlamaModel
from quire.ops import OpSet, Team
from quire.quantization import QuantizedFormats
from quire.worker.settings import WorkerSettings

__all__ = ["LoadedEagle", "LoadedHeads", "load_heads", "taps_of"]


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """layout: layout of its K/V. backends: backend of each layer group of the layout. columns:
    columns that its layers read. state_width: numbers of the model's states per token."""

    head: EagleHead
    layout: KVLayout
    backends: Sequence[AttentionBackend]
    columns: TokenColumns
    state_width: int


LoadedHeads = MedusaHeads | LoadedEagle


def taps_of(draft: Draft | None) -> StateTaps | None:
    """Return where the model is read for these heads; None for nowhere between layers."""
    if not isinstance(draft, DraftHeads) or draft.eagle is None or not draft.eagle.state_layers:
        return None
    return StateTaps(draft.eagle.state_layers)


def load_heads(
    draft: DraftHeads,
    settings: WorkerSettings,
    ops: OpSet,
    team: Team,
    device: torch.device,
    target: CausalLM,
) -> LoadedHeads:
    """Load heads of `target`, computed by the same operations. Raises ConfigError if their files
    are of another layout."""
    dtype: torch.dtype = getattr(torch, settings.chosen.dtype)
    formats, columns = QuantizedFormats(settings.chosen.quantization, ops), TokenColumns(ops)
    positions = settings.chosen.max_model_len
    if draft.eagle is None:
        make = LayerFactory(ops, {}, dtype, device, positions, formats, columns=columns)
        return load_medusa(draft.target, draft.file, make)
    assert isinstance(target, LlamaModel), "the settings were checked"
    layout = draft.layout(settings.layout)
    chosen = select_backends(
        settings.platform,
        [
            AttentionNeeds.of_group(draft.eagle.layer, group.kv.format, dtype)
            for group in layout.groups
        ],
        [group.layers for group in layout.groups],
        settings.attention_backend,
        team,
        preferred=settings.preferred_attention,
    )
    by_layer = chosen.by_layer(layout)
    make = LayerFactory(ops, by_layer, dtype, device, positions, formats, columns=columns)
    head = load_eagle(draft.eagle, draft.file, make, target)
    return LoadedEagle(head, layout, chosen.backends, columns, draft.eagle.state_width)
