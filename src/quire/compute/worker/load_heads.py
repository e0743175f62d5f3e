"""Heads that guess tokens from states of a model, loaded beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quire.compute.attention import AttentionBackend, AttentionNeeds, select_backends
from quire.compute.layers import LayerFactory, StateTaps, TokenColumns
from quire.compute.models import CausalLM
from quire.compute.models.causal_lm import HasMTP
from quire.compute.models.heads import MedusaHeads, load_eagle, load_medusa, load_mtp
from quire.compute.models.llama import LlamaModel
from quire.compute.quantization import QuantizedFormats
from quire.compute.runner.drafting.state_layer import StateHead
from quire.compute.worker.settings import WorkerSettings
from quire.config import ModelSpec
from quire.config.kv_layout import KVLayout
from quire.config.speculation.draft_model import Draft
from quire.config.speculation.heads import DraftHeads
from quire.config.speculation.mtp import MTPDraft
from quire.ops import OpSet, Team
from quire.ops.distributed import Collectives

__all__ = ["LoadedHeads", "LoadedLayer", "load_heads", "taps_of"]


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A head with K/V of its own. layout: layout of its K/V. backends: backend of each layer group
    of the layout. columns: columns that its layers read. state_width: numbers of the model's states
    per token."""

    head: StateHead
    layout: KVLayout
    backends: Sequence[AttentionBackend]
    columns: TokenColumns
    state_width: int


LoadedHeads = MedusaHeads | LoadedLayer
_Parts = tuple[KVLayout, Sequence[AttentionBackend], TokenColumns]


def taps_of(draft: Draft | None) -> StateTaps | None:
    """Return where the model is read for these heads; None for nowhere between layers."""
    if not isinstance(draft, DraftHeads) or draft.eagle is None or not draft.eagle.state_layers:
        return None
    return StateTaps(draft.eagle.state_layers)


def load_heads(
    draft: DraftHeads | MTPDraft,
    settings: WorkerSettings,
    ops: OpSet,
    team: Team,
    device: torch.device,
    target: CausalLM,
    replaced: Mapping[str, torch.Tensor],
    columns: TokenColumns,
    collectives: Collectives,
) -> LoadedHeads:
    """Load heads of `target`, computed by the same operations. replaced: weights of the model's
    checkpoint, by name, that take the place of those on disk. columns: columns of the target's
    layers. collectives: connection to ranks that share an MTP layer. Raises ConfigError if the
    files are of another layout."""
    dtype: torch.dtype = getattr(torch, settings.chosen.dtype)
    formats, own_columns = QuantizedFormats(settings.chosen.quantization, ops), TokenColumns(ops)
    positions, shard = settings.chosen.max_model_len, settings.shard

    def with_kv(layer: ModelSpec, layout: KVLayout) -> tuple[LayerFactory, _Parts]:
        num_heads = shard.equal(layer.num_heads, "query heads").count
        needs = [AttentionNeeds.of_group(layer, each.kv.format, dtype) for each in layout.groups]
        chosen = select_backends(
            settings.platform,
            [replace(each, num_heads=num_heads) for each in needs],
            [group.layers for group in layout.groups],
            settings.attention_backend,
            team,
            preferred=settings.preferred_attention,
        )
        make = LayerFactory(
            ops,
            chosen.by_layer(layout),
            dtype,
            device,
            positions,
            formats,
            columns=own_columns,
            shard=shard,
            collectives=collectives,
        )
        return make, (layout, chosen.backends, own_columns)

    if isinstance(draft, MTPDraft):
        assert isinstance(target, HasMTP), "families that name MTP layers have them"
        make, parts = with_kv(draft.layer, draft.layout(settings.layout))
        head = load_mtp(draft, make, target, columns, settings.chosen.seed, replaced)
        return LoadedLayer(head, *parts, draft.target.hidden_size)
    if draft.eagle is None:
        make = LayerFactory(ops, {}, dtype, device, positions, formats, columns=own_columns)
        return load_medusa(draft.target, draft.file, make)
    assert isinstance(target, LlamaModel), "the settings were checked"
    make, parts = with_kv(draft.eagle.layer, draft.layout(settings.layout))
    head = load_eagle(draft.eagle, draft.file, make, target)
    return LoadedLayer(head, *parts, draft.eagle.state_width)
