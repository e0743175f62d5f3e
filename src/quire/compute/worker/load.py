"""The first half of a worker's start: a device, kernels, and a model on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.compute.attention import AttentionNeeds, GroupBackends, select_backends
from quire.compute.layers import GivenEmbeddings, LayerFactory, LogitParts, StateTaps, TokenColumns
from quire.compute.layers.adapted import ADAPTER_COLUMN, AdaptedLayers
from quire.compute.layers.recurrent import RecurrentLayers
from quire.compute.models import CausalLM, Classifies, load_model, load_tower
from quire.compute.models.towers import ImageTower
from quire.compute.quantization import QuantizedFormats
from quire.compute.worker.load_heads import LoadedHeads, load_heads, taps_of
from quire.compute.worker.settings import WorkerSettings
from quire.config import ModelSpec, read_checkpoint
from quire.config.model_spec import GenericTraits
from quire.config.packed import CacheScales, read_cache_scales
from quire.config.speculation.draft_model import DraftModel
from quire.ops import REFERENCE, OpSet, Team, build_op_set
from quire.ops.compiled import with_compiled
from quire.ops.distributed import ALONE, Collectives
from quire.ops.distributed.gloo import GlooMeeting
from quire.ops.exchange import join_region
from quire.ops.native.cpu_provider import CACHE_DTYPE_CODES

__all__ = ["LoadedModel", "load", "open_device"]

_log = logging.getLogger("quire.worker")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """spec: spec with the dtype of the computation. team: the threads that compute on a CPU.
    columns: columns that the model's layers read. given: embeddings that requests bring. by_torch:
    whether torch computes some layers, or multiplies with some matrices, as no kernel serves the
    checkpoint's format. cache_scales: scales of a cache in float8, by layer. adapters: memory for
    adapters of requests; None without LoRA. draft: the model that guesses tokens, over a pool of
    `KVLayout.of_draft`. heads: heads that guess tokens from states of the model. taps: readers of
    states between layers. collectives: connection to the ranks that hold the model together. parts:
    switch for logits that stay in parts. recurrent: layers with recurrent states; None without.
    tower: encoder of images; None without.
    """

    spec: ModelSpec
    device: torch.device
    team: Team
    ops: OpSet
    attention: GroupBackends
    kv_dtype: torch.dtype
    model: CausalLM
    columns: TokenColumns
    given: GivenEmbeddings
    by_torch: bool
    cache_scales: CacheScales
    adapters: AdaptedLayers | None = None
    draft: LoadedModel | None = None
    heads: LoadedHeads | None = None
    taps: StateTaps | None = None
    collectives: Collectives = ALONE
    parts: LogitParts = field(default_factory=LogitParts)
    recurrent: RecurrentLayers | None = None
    tower: ImageTower | None = None

    @property
    def whole_prompts(self) -> bool:
        """True if tokens of a prompt see all of it, so that one step computes it."""
        return self.spec.whole_prompts

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states on this rank."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes

    @property
    def classify(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Numbers for each class of hidden states; None if the model has no classes."""
        model = self.model
        return model.scores if self.spec.num_classes and isinstance(model, Classifies) else None

    @property
    def kernels(self) -> str:
        """A sentence on what computes: "attention: cpu_avx512 (…); linear by …; all 25 other
        operations by …". The provider of most operations comes last, without their names."""
        by_provider: dict[str, list[str]] = {}
        for op, provider in self.ops.chosen.items():
            if op != "paged_attention":
                by_provider.setdefault(provider, []).append(op)
        most = max(by_provider, key=lambda name: len(by_provider[name]))
        others = by_provider.pop(most)
        told = [f"{', '.join(names)} by {name}" for name, names in by_provider.items()]
        told.append(f"all {len(others)} other operations by {most}")
        return "; ".join((self.attention.reason.rstrip("."), *told))

    @property
    def kernel_family(self) -> str:
        """Provider of matrix products, by which the others are chosen too."""
        return self.ops.chosen["linear"]

    @property
    def numerics(self) -> Literal["fast", "invariant"]:
        """ "invariant" if a row's bits do not depend on the rows beside it, else "fast"."""
        return "fast" if self.unstable else "invariant"

    @property
    def unstable(self) -> str:
        """The reason for which a row's bits may depend on the rows beside it; empty if none."""
        on_cpu, family = self.device.type == "cpu", self.kernel_family
        if isinstance(self.spec.traits, GenericTraits):
            return "transformers computes the model"
        if self.by_torch:
            return "torch multiplies matrices that are widened as they are used"
        if family == REFERENCE:
            return "torch multiplies matrices, since no compiled kernels are there"
        if on_cpu and self.attention.by_torch:
            return "torch computes attention, since no kernel reads this KV cache"
        if not on_cpu and family != "triton_invariant":
            return "the kernels of this GPU sum in an order that the batch decides"
        return ""


def open_device(platform: Platform) -> torch.device:
    """Return the device for tensors. Raises ConfigError with the driver's words if it does not
    start."""
    if platform.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)  # of those that the process may see
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
    except (AssertionError, RuntimeError) as error:  # torch raises both, as what is missing
        reason = " ".join(str(error).split())
        raise ConfigError(f"The GPU does not start: {reason}. Or give device='cpu'.") from error
    return device


def load(
    settings: WorkerSettings,
    device: torch.device,
    replaced: Mapping[str, torch.Tensor] | None = None,
    team: Team | None = None,
) -> LoadedModel:
    """Choose kernels, build the model and fill it, tensor by tensor. replaced: weights, by name,
    that take the place of the checkpoint's. team: threads that compute already. Raises ConfigError
    if it cannot be loaded as asked."""
    chosen = settings.chosen
    torch.set_num_threads(chosen.num_threads)
    if team is None:  # if a GPU computes, none of our threads does
        team = Team(chosen.num_threads if device.type == "cpu" else 1)
    kv_dtype: torch.dtype = getattr(torch, chosen.kv_cache_dtype)
    spec = replace(settings.spec, dtype=chosen.dtype)
    is_generic = isinstance(spec.traits, GenericTraits)
    ops = _choose_ops(settings, device, kv_dtype, team)
    collectives = _join_ranks(settings, ops, team)
    attention = _attention(settings, spec, kv_dtype, team)
    formats = QuantizedFormats(chosen.quantization, ops)
    columns = TokenColumns(ops)
    adapters = _make_adapters(settings, ops, device, columns) if chosen.enable_lora else None
    taps = taps_of(settings.draft)
    factory = LayerFactory(
        ops,
        attention.by_layer(settings.layout),
        getattr(torch, chosen.dtype),
        device,
        chosen.max_model_len,
        formats,
        quantized_cache=kv_dtype.itemsize == 1,
        shard=settings.shard,
        collectives=collectives,
        columns=columns,
        adapters=adapters,
        taps=taps,
        rank_invariant=chosen.rank_invariant,
    )
    with torch.inference_mode():
        model = load_model(
            spec,
            settings.folder,
            factory,
            settings.load_format,
            chosen.seed,
            not chosen.quiet,
            replaced,
        )
    if chosen.batch_invariant and formats.by_torch:
        raise ConfigError(
            f"batch_invariant=True: {settings.folder} has matrices that are widened as they are "
            "used, since no kernel holds their scales or groups (warnings name them), and torch "
            "multiplies those by sums that may depend on the batch. Give quantization='int8', or "
            "leave it out."
        )
    draft = heads = None
    if isinstance(settings.draft, DraftModel):
        draft = load(settings.of_draft(settings.draft), device, team=team)
    elif settings.draft is not None:
        with torch.inference_mode():
            draft_of = (settings.draft, settings, ops, team, device, model)
            heads = load_heads(*draft_of, replaced or {}, columns, collectives)
    loaded = LoadedModel(
        spec,
        device,
        team,
        ops,
        attention,
        kv_dtype,
        model,
        columns,
        factory.given,
        formats.by_torch or is_generic,
        _cache_scales(settings, kv_dtype),
        adapters,
        draft,
        heads,
        taps,
        collectives,
        factory.parts,
        factory.recurrent if factory.recurrent.state_bytes else None,
        _load_tower(settings, spec, kv_dtype, device),
    )
    # Torch's own threads have only loaded if kernels compute; a draft model left one of them.
    torch.set_num_threads(chosen.num_threads if _torch_computes(loaded) else 1)
    return loaded


def _load_tower(
    settings: WorkerSettings, spec: ModelSpec, kv_dtype: torch.dtype, device: torch.device
) -> ImageTower | None:
    """Load the encoder of images, with threads of its own, so that steps go on beside it. Rank 0
    alone has one."""
    chosen = settings.chosen
    if spec.images is None or settings.shard.rank:
        return None
    team = Team(chosen.num_threads if device.type == "cpu" else 1, gives_way=True)
    ops = _choose_ops(settings, device, kv_dtype, team)
    factory = LayerFactory(ops, {}, getattr(torch, chosen.dtype), device, max_positions=0)
    with torch.inference_mode():
        return load_tower(spec, settings.folder, factory, settings.load_format, chosen.seed)


def _torch_computes(loaded: LoadedModel) -> bool:
    """Return whether torch multiplies on this CPU, for the model or its draft model."""
    if loaded.device.type != "cpu":
        return False
    by_kernels = loaded.ops.chosen["linear"] != REFERENCE and not loaded.by_torch
    return not by_kernels or (loaded.draft is not None and loaded.draft.by_torch)


def _choose_ops(
    settings: WorkerSettings, device: torch.device, kv_dtype: torch.dtype, team: Team
) -> OpSet:
    forced = settings.forced_ops
    if kv_dtype not in CACHE_DTYPE_CODES:  # no kernel writes it
        forced = {**forced, "rope_and_write_kv": REFERENCE}
    ops = build_op_set(settings.platform, forced, team)
    ops = ops.with_activation_bits(settings.chosen.activation_bits)
    return with_compiled(ops, device) if settings.chosen.torch_compile else ops


def _join_ranks(settings: WorkerSettings, ops: OpSet, team: Team) -> Collectives:
    """Meet the other ranks of the model, if there are any."""
    meeting, rank = settings.meeting, settings.shard.rank
    if meeting is None:
        return ALONE
    if isinstance(meeting, GlooMeeting):
        return meeting.join(rank)
    return join_region(meeting, rank, ops.chosen["linear"], team)


def _make_adapters(
    settings: WorkerSettings, ops: OpSet, device: torch.device, columns: TokenColumns
) -> AdaptedLayers:
    """Return places for adapters. ConfigError if `transformers` computes the model."""
    if isinstance(settings.spec.traits, GenericTraits):
        raise ConfigError(
            "enable_lora=True needs a model that quire computes itself: leave it out, or merge the "
            "adapter into the model"
        )
    return AdaptedLayers(
        settings.chosen.max_loras,
        settings.chosen.max_lora_rank,
        getattr(torch, settings.chosen.dtype),
        device,
        columns.column(ADAPTER_COLUMN, optional=True),
        ops.low_rank,
        ops.linear,
    )


def _cache_scales(settings: WorkerSettings, kv_dtype: torch.dtype) -> CacheScales:
    """Return the scales of a cache in float8. Raises ConfigError for a checkpoint with impossible
    ones."""
    is_float8 = kv_dtype.itemsize == 1 and kv_dtype.is_floating_point
    if not is_float8 or settings.load_format == "dummy":
        return {}
    found = read_checkpoint(settings.folder).cache_scales
    if not found:
        _log.info("The checkpoint has no scales for a KV cache in float8; they are 1.")
    return read_cache_scales(found, settings.spec.num_layers)


def _attention(
    settings: WorkerSettings, spec: ModelSpec, kv_dtype: torch.dtype, team: Team
) -> GroupBackends:
    """Choose backends by the needs of each layer group, with the heads that this rank has."""
    groups = settings.layout.groups
    num_heads = settings.shard.equal(spec.num_heads, "query heads").count
    needs = [AttentionNeeds.of_group(spec, group.kv.format, kv_dtype) for group in groups]
    chosen = select_backends(
        settings.platform,
        [replace(each, num_heads=num_heads) for each in needs],
        [group.layers for group in groups],
        settings.attention_backend,
        team,
        preferred=settings.preferred_attention,
    )
    return chosen.splittable() if settings.device_state else chosen
