"""Gemma 4's text model: layers of two shapes, the last of which read K and V of others; experts
beside MLPs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.errors import ConfigError
from quire.config.families.family import Family
from quire.config.families.gemma import GEMMA_BLOCK
from quire.config.families.gguf_names import PROJECTIONS, GGUFNames, expert_block
from quire.config.families.llama import read_llama_like
from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    read_layer_types,
    read_num_layers,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    ExpertsSpec,
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    ParameterCounts,
    Routing,
)
from quire.config.rope import ProportionalScaling, RopeSpec

__all__ = ["FAMILIES", "Gemma4Traits"]

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
"""Values that the family means where the file is silent."""

_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_SHAPE_KEYS = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class Gemma4Traits:
    """Gemma 4's text model. keys_are_values: whether V is K before its norm, by layer. kv_sources:
    number of the layer that each layer reads K and V from. inner_sizes: inner size of each layer's
    MLP. token_size: elements per token and layer in a second table, which has token_vocab rows; 0:
    there is no such table. logit_cap: cap on the logits."""

    keys_are_values: tuple[bool, ...]
    kv_sources: tuple[int, ...]
    inner_sizes: tuple[int, ...]
    token_size: int
    token_vocab: int
    logit_cap: float | None


def read_gemma4(raw: RawConfig, dtype: str) -> ModelSpec:
    raw = raw.with_defaults(_DEFAULTS)
    raw.reject("use_bidirectional_attention", "all", "quire serves decoder-only models")
    raw.reject("attention_bias", True, "quire serves Gemma 4 without biases")
    num_layers = read_num_layers(raw)
    by_pattern = tuple(SLIDING if (layer + 1) % 6 else FULL for layer in range(num_layers))
    layer_types = (*read_layer_types(raw, num_layers, by_pattern)[:-1], FULL)
    shapes = _kv_shapes(raw, layer_types)
    sources, num_shared = _kv_sources(raw, layer_types)
    double = 2 if raw.read(bool, "use_double_wide_mlp", default=False) else 1
    inner = raw.read_size("intermediate_size")
    sizes = tuple(
        inner * (1 if source == layer else double) for layer, source in enumerate(sources)
    )
    same = raw.read(bool, "attention_k_eq_v", default=False)
    traits = Gemma4Traits(
        keys_are_values=tuple(same and kind == FULL for kind in layer_types),
        kv_sources=sources,
        inner_sizes=sizes,
        token_size=raw.read(int, "hidden_size_per_layer_input") or 0,
        token_vocab=raw.read_size("vocab_size_per_layer_input"),
        logit_cap=raw.read_optional(float, "final_logit_softcapping"),
    )
    without_ropes = raw.overridden({"rope_parameters": None, "hidden_act": None})
    spec = read_llama_like(without_ropes, dtype, LlamaTraits(), layer_types, tied=True)
    spec = replace(
        spec,
        activation=raw.read_choice(ACTIVATIONS, "hidden_activation", default="gelu_pytorch_tanh"),
        num_kv_heads=max(kv_heads for kv_heads, _ in shapes),
        head_dim=max(head_dim for _, head_dim in shapes),
        intermediate_size=max(sizes),
        ropes=_ropes(raw, layer_types, shapes),
        traits=traits,
        kv_shapes=shapes,
        num_shared_kv=num_shared,
        side_size=traits.token_size * num_layers,
        experts=_experts(raw, num_layers),
    )
    return _counted(spec, traits)


def _experts(raw: RawConfig, num_layers: int) -> ExpertsSpec | None:
    """Experts beside the MLP of every layer, if there are any."""
    if not raw.read(bool, "enable_moe_block", default=False):
        return None
    count, top_k = raw.read_size("num_experts"), raw.read_size("top_k_experts")
    if top_k > count:
        raise ConfigError(
            f"{raw.source}: top_k_experts={top_k} must be at most num_experts={count}"
        )
    routing = Routing(count, top_k, has_factors=True)
    inner = raw.read_size("moe_intermediate_size")
    return ExpertsSpec(routing, (True,) * num_layers, inner, "gemma4")


def _kv_shapes(raw: RawConfig, layer_types: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Number of kv heads and head_dim of each layer. Files of `transformers` 5.24 have them by
    layer, published ones for all full layers."""
    own = raw.read_size("num_key_value_heads"), raw.read_size("head_dim")
    by_layer = _by_layer(raw, len(layer_types))
    full_heads = own[0]
    if raw.read(bool, "attention_k_eq_v", default=False):
        full_heads = raw.read_size("num_global_key_value_heads", default=own[0])
    full = full_heads, raw.read_size("global_head_dim", default=512)
    found: list[tuple[int, int]] = []
    for layer, kind in enumerate(layer_types):
        shape = full if kind == FULL else own
        if by_layer is not None:
            section = by_layer.get(layer) or RawConfig({}, raw.source)
            if unknown := set(section) - _SHAPE_KEYS:
                raise ConfigError(
                    f"{section.source}: {', '.join(sorted(unknown))} of one layer is not supported"
                )
            shape = (
                section.read_size("num_key_value_heads", default=own[0]),
                section.read_size("head_dim", default=own[1]),
            )
        found.append(shape)
    num_heads = raw.read_size("num_attention_heads")
    if any(num_heads % kv_heads for kv_heads, _ in found):
        raise ConfigError(
            f"{raw.source}: num_attention_heads={num_heads} is not a multiple of each layer's "
            "num_key_value_heads"
        )
    return tuple(found)


def _by_layer(raw: RawConfig, num_layers: int) -> dict[int, RawConfig] | None:
    """Settings that single layers have, if any are stated so. A key is the number of a layer, which
    may begin with zeros."""
    stated = raw.section("per_layer_config")
    if stated is None:
        return None
    numbers = {str(layer): layer for layer in range(num_layers)}
    found: dict[int, RawConfig] = {}
    for key in stated:
        layer = numbers.get(key[:-1].lstrip("0") + key[-1:])
        if layer is None or layer in found:
            problem = "is no layer" if layer is None else "is there twice"
            raise ConfigError(
                f"{stated.source}: {key[:80]!r} {problem}; state each layer from 0 to "
                f"{num_layers - 1} once"
            )
        found[layer] = stated.section(key) or RawConfig({}, stated.source)
    return found


def _kv_sources(raw: RawConfig, layer_types: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """The layer whose K and V each one reads, and how many read those of another: these take the
    last one of their kind that has its own."""
    num_layers, num_shared = len(layer_types), raw.read(int, "num_kv_shared_layers", default=0)
    first = num_layers - num_shared
    if num_shared < 0 or not set(layer_types) <= set(layer_types[: max(first, 0)]):
        raise ConfigError(
            f"{raw.source}: num_kv_shared_layers={num_shared} of {num_layers} leaves no layer of "
            "each kind with K and V of its own"
        )
    last = {kind: layer for layer, kind in enumerate(layer_types[:first])}
    own = tuple(range(first))
    return (*own, *(last[kind] for kind in layer_types[first:])), num_shared


def _ropes(
    raw: RawConfig, layer_types: tuple[str, ...], shapes: tuple[tuple[int, int], ...]
) -> tuple[RopeSpec, ...]:
    section = raw.section("rope_parameters") or RawConfig(_ROPES, raw.source)
    found: list[RopeSpec] = []
    for kind, (_, head_dim) in zip(layer_types, shapes, strict=True):
        rope = section.section(kind)
        if rope is None:
            raise ConfigError(f"{section.source}: no entry for layer type {kind!r}; add one")
        chosen = rope.read_choice(("default", "proportional"), "rope_type", default="default")
        theta = rope.read(float, "rope_theta", default=1e4)
        scaling = None
        if chosen == "proportional":
            share = rope.read(float, "partial_rotary_factor", default=1.0)
            scaling = ProportionalScaling(share, rope.read(float, "factor", default=1.0))
            if not 0 <= share <= 1 or scaling.factor <= 0:
                raise ConfigError(
                    f"{rope.source}: partial_rotary_factor={share} must be from 0 to 1, and "
                    f"factor={scaling.factor} positive"
                )
        if theta <= 0:
            raise ConfigError(f"{rope.source}: rope_theta={theta} must be positive")
        found.append(RopeSpec(head_dim, theta, scaling))
    return tuple(found)


def _counted(spec: ModelSpec, traits: Gemma4Traits) -> ModelSpec:
    """The spec with its matrices and parameters."""
    hidden, side, total = spec.hidden_size, traits.token_size, traits.token_size * spec.num_layers
    matrices: list[MatrixShape] = []
    norms = 0
    for layer, (kv_heads, head_dim) in enumerate(spec.kv_shapes):
        is_own = traits.kv_sources[layer] == layer
        planes = (1 if traits.keys_are_values[layer] else 2) if is_own else 0
        queries, inner = spec.num_heads * head_dim, traits.inner_sizes[layer]
        matrices += [
            MatrixShape(queries + planes * kv_heads * head_dim, hidden),
            MatrixShape(hidden, queries),
            MatrixShape(2 * inner, hidden),
            MatrixShape(hidden, inner),
        ]
        norms += 4 * hidden + (2 if is_own else 1) * head_dim + 1
        if side:
            matrices += [MatrixShape(side, hidden), MatrixShape(hidden, side)]
            norms += hidden
    if side:
        matrices.append(MatrixShape(total, hidden))
        norms += side
    layers = norms + sum(each.outputs * each.inputs for each in matrices)
    idle = 0
    if (experts := spec.experts) is not None:
        count = spec.num_layers * experts.routing.num_experts
        matrices.append(MatrixShape(2 * experts.inner_size, hidden, count))
        matrices.append(MatrixShape(hidden, experts.inner_size, count))
        layers += spec.num_layers * (experts.layer_parameters(hidden) + 4 * hidden)  # four norms
        idle = spec.num_layers * experts.idle_parameters(hidden)
    per_layer, rest = divmod(layers, spec.num_layers)
    table = spec.vocab_size * hidden + traits.token_vocab * total
    head = hidden + (0 if spec.tie_word_embeddings else spec.vocab_size * hidden)
    merged = {(each.outputs, each.inputs): 0 for each in matrices}
    for each in matrices:
        merged[each.outputs, each.inputs] += each.count
    return replace(
        spec,
        parameters=ParameterCounts(table, per_layer, head, extra=rest, idle=idle),
        matrices=(
            *(MatrixShape(*shape, count) for shape, count in merged.items()),
            MatrixShape(spec.vocab_size, hidden, is_head=True),
        ),
    )


_BLOCK = {
    **expert_block("router.proj", "experts", PROJECTIONS),
    **GEMMA_BLOCK,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_TEXT = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
"""Values of `transformers` for a text model in a model of more parts."""

FAMILIES = (
    Family(
        "Gemma 4, text",
        "quire.compute.models.gemma4:Gemma4Model",
        "gemma4_text",
        {"Gemma4ForCausalLM": read_gemma4},
        GGUFNames("gemma4", _BLOCK, ropes=("freq_base_swa", "dimension_count_swa")),
        _TEXT,
    ),
)
