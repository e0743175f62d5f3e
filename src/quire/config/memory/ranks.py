"""Tensor parallelism before anything is loaded: whether ranks can share a model, what each of them
holds, and what does not work beside it."""

from __future__ import annotations

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config.families.gemma4 import Gemma4Traits
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import GenericTraits, ModelSpec
from quire.config.settings import EngineSettings
from quire.config.shard import NUM_PIECES, Shard, Share

__all__ = [
    "check_rank_invariant",
    "check_ranks",
    "describe_rank",
    "rank_layout",
    "rank_weight_bytes",
]


def check_ranks(
    settings: EngineSettings, spec: ModelSpec, platform: Platform, *, has_draft_model: bool
) -> None:
    """Raise ConfigError, which names the reason, if `tensor_parallel_size` ranks cannot compute
    this model with these settings."""
    asked = f"tensor_parallel_size={settings.tensor_parallel_size}"
    if platform.device != "cpu":
        raise ConfigError(
            f"{asked} on {platform.device}: ranks run on CPUs alone so far. Give device='cpu', or "
            "leave it out."
        )
    if platform.system != "linux":
        raise ConfigError(
            f"{asked}: ranks share memory as Linux alone has it, and this is {platform.system}. "
            "Leave it out."
        )
    if isinstance(spec.traits, GenericTraits):
        raise ConfigError(
            f"{asked}: transformers computes {spec.architecture}, as a whole. Leave it out, or use "
            "an architecture of quire's own."
        )
    beside = {
        "torch_compile": settings.torch_compile,
        "a draft model": has_draft_model,
    }
    for name, is_there in beside.items():
        if is_there:
            raise ConfigError(
                f"{asked} and {name} do not go together so far. Leave one of them out."
            )
    for rank in range(settings.tensor_parallel_size):
        try:
            _shares(spec, Shard(rank, settings.tensor_parallel_size))
        except ConfigError as error:
            raise ConfigError(
                f"{asked} does not fit the model ({spec.architecture}): {error}."
            ) from None


def check_rank_invariant(settings: EngineSettings, spec: ModelSpec, platform: Platform) -> None:
    """Raise ConfigError, which names the reason, where results would depend on the number of
    ranks."""
    ranks = settings.tensor_parallel_size
    outputs = {spec.num_heads * head_dim for _, head_dim in _kv_shapes(spec)}
    if spec.latent is not None:
        outputs = {spec.num_heads * spec.latent.value}
    uneven = {
        f"{size} {noun} are no multiple of {NUM_PIECES}": size % NUM_PIECES != 0
        for noun, sizes in (("outputs of heads", outputs), ("neurons", _mlp_sizes(spec)))
        for size in sorted(sizes)
    }
    reasons = {
        f"tensor_parallel_size={ranks} does not divide {NUM_PIECES}": NUM_PIECES % ranks != 0,
        "ranks run on CPUs of Linux alone": (platform.device, platform.system) != ("cpu", "linux"),
        f"transformers computes {spec.architecture}": isinstance(spec.traits, GenericTraits),
        "ranks have different experts": spec.experts is not None,
        "quantized rows are cut in another way": settings.quantization is not None,
        "adapters are added in another order": settings.enable_lora,
        "torch compiles sums of its own": settings.torch_compile,
        **uneven,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"rank_invariant=True: {reason}. Leave one of them out.")


def _shares(spec: ModelSpec, shard: Shard) -> dict[str, tuple[int, int]]:
    """Return for each thing that ranks share how many this one has, and how many there are: in the
    layer that has most, if layers differ."""
    experts = spec.experts
    shares: dict[str, Share] = {}
    if spec.has_kv:
        shares["query heads"] = shard.equal(spec.num_heads, "query heads")
        for kv_heads in sorted({kv_heads for kv_heads, _ in _kv_shapes(spec)}):
            shares["kv heads"] = shard.kv_heads(kv_heads)
    shares["tokens of the vocabulary"] = shard.vocabulary(spec.vocab_size)
    if experts is not None:
        shares["experts"] = shard.in_units(experts.routing.num_experts, 1, "experts")
    for inner_size in sorted(_mlp_sizes(spec)):
        shares["MLP neurons"] = shard.equal(inner_size, "MLP neurons")
    if experts is not None and experts.shared_size is not None:
        noun = "shared MLP neurons"
        shares[noun] = shard.equal(experts.shared_size, noun)
    return {noun: (share.count, share.total) for noun, share in shares.items()}


def _kv_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return kv heads and head_dim of layers; of one, if all are alike."""
    return spec.kv_shapes or ((spec.num_kv_heads, spec.head_dim),)


def _mlp_sizes(spec: ModelSpec) -> set[int]:
    """Return the numbers of neurons of MLPs that layers have beside experts, or instead of them."""
    if isinstance(spec.traits, Gemma4Traits):
        return set(spec.traits.inner_sizes)
    has_mlps = spec.intermediate_size and (spec.experts is None or not all(spec.experts.layers))
    return {spec.intermediate_size} if has_mlps else set()


def describe_rank(spec: ModelSpec, size: int) -> str:
    """Say what the first of `size` ranks holds; no other one holds more."""
    shares = _shares(spec, Shard(0, size)).items()
    parts = (f"{own:,} of {total:,} {noun.partition(' of ')[0]}" for noun, (own, total) in shares)
    return f"a process has {', '.join(parts)}"


def rank_layout(layout: KVLayout, size: int) -> KVLayout:
    """The layout of one rank's pool. With fewer kv heads than ranks some have the same head."""
    return layout.of_rank(Shard(0, size))


def rank_weight_bytes(spec: ModelSpec, weights: int, size: int) -> int:
    """Return what the first rank has of `weights` bytes of a model, which is most: its part of each
    matrix and of the table of tokens, and all of the norms and of the image encoder. A kv head that
    several ranks have counts for each of them, and as it is without quantization; so do the
    projections that make one vector for all heads."""
    if size == 1:
        return weights
    shared = sum(each.count * each.outputs * each.inputs for each in spec.matrices)
    if not spec.tie_word_embeddings:
        shared += spec.vocab_size * spec.hidden_size
    tower = 0 if spec.images is None else spec.images.num_parameters
    whole = min(max(spec.num_parameters + tower - shared, 0) * spec.dtype_bytes, weights)
    head = 2 * spec.num_layers * spec.hidden_size * spec.head_dim * spec.dtype_bytes
    if spec.latent is not None:  # one projection to the vectors of tokens, and one of queries
        rows = spec.latent.width + (spec.latent.query_rank or 0)
        head = spec.num_layers * spec.hidden_size * rows * spec.dtype_bytes
    copied = head * max(size - spec.num_kv_heads, 0) // size
    return whole + copied - (whole - weights) // size
