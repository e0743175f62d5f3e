"""config.json of Mamba 2 and Granite 4 to `ModelSpec`: selective states, and in Granite attention
in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import cast

from quire.base.errors import ConfigError
from quire.config.families.family import Family
from quire.config.families.gguf_names import BLOCK, PROJECTIONS, GGUFNames, expert_block
from quire.config.families.llama import GRANITE_NUMBERS, read_granite
from quire.config.families.shared import (
    FULL,
    read_common,
    read_layer_types,
    read_num_layers,
    read_taps,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    ParameterCounts,
    SSDHeads,
)

__all__ = [
    "FAMILIES",
    "GRANITE_GGUF",
    "SPLIT_MLP",
    "SSDTraits",
    "SSD_MODEL",
    "read_granite_hybrid",
    "read_mamba2",
]

LINEAR = "linear_attention"
SPLIT_MLP, INNER_SIZE, HAS_ROPE = "split_mlp", "ssm_inner_size", "has_rope"
"""Keys that only GGUF files have: gate and up are two tensors; elements of x of all heads; whether
layers that attend see positions."""

MAX_STATE_SIZE, COLUMNS = 256, 16
"""The kernel's limit, and its unit of a head (csrc/recurrent/ssd.cpp); models have 128 and 64."""

MAMBA_CONTEXT = 2**17
"""Tokens of a context where the file names none; nothing but training limits it."""

_INFINITY, _LARGEST = {"__float__": "Infinity"}, 3e38
"""Infinity as files write it, and the number that stands for it: a step is far below both."""

_MAMBA2 = {
    "num_heads": 128,
    "head_dim": 64,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "state_size": 128,
    "num_hidden_layers": 64,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_GRANITE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


@dataclass(frozen=True, slots=True)
class SSDTraits:
    """taps: tokens that a convolution sees, its own included. conv_bias, bias: whether the
    convolution, and the projections around it, have a bias. granite: factors and biases of
    attention; None for a model without attention and without MLPs. fused_mlp: gate and up are one
    tensor on disk."""

    heads: SSDHeads
    taps: int
    conv_bias: bool
    bias: bool
    granite: LlamaTraits | None = None
    fused_mlp: bool = False

    def parameters(self, hidden: int) -> int:
        """Parameters of the operator of a layer."""
        heads = self.heads
        matrices = hidden * (heads.inputs + heads.inner) + heads.channels * self.taps
        biases = self.bias * (heads.inputs + hidden) + self.conv_bias * heads.channels
        return matrices + biases + heads.inner + 3 * heads.num_heads

    @property
    def mixer_size(self) -> int:
        """Elements of a token that a layer holds at once."""
        return self.heads.inputs + self.heads.channels + 3 * self.heads.inner

    def states(self, has_state: tuple[bool, ...]) -> tuple[int, ...]:
        """Elements of the convolution's state in each layer; () if none has one."""
        size = (self.taps - 1) * self.heads.channels
        return tuple(size * each for each in has_state) if any(has_state) else ()

    def state_inputs(self, has_state: tuple[bool, ...]) -> int:
        """Elements of a token that the convolutions and the states of all layers read."""
        return (2 * self.heads.channels + self.heads.num_heads) * sum(has_state)

    def copied(self, has_state: tuple[bool, ...]) -> tuple[int, int]:
        """Elements of these states and inputs that each rank has: B and C of the only group."""
        if self.heads.num_groups > 1:
            return 0, 0
        of_layers = 2 * self.heads.state_size * sum(has_state)
        return (self.taps - 1) * of_layers, 2 * of_layers

    def wide_states(self, has_state: tuple[bool, ...]) -> tuple[int, ...]:
        """Elements of the heads' states in each layer; () if none has one."""
        size = self.heads.state
        return tuple(size * each for each in has_state) if any(has_state) else ()


def read_mamba2(raw: RawConfig, dtype: str) -> ModelSpec:
    """Every layer has a state, and none attends. Residuals have the model's dtype."""
    raw = raw.with_defaults(_MAMBA2)
    hidden, num_layers = raw.read_size("hidden_size"), read_num_layers(raw)
    common = read_common(raw, dtype, "mamba2", hidden, num_layers, (0, 0, 0))
    vocab = common["vocab_size"]
    names = ("num_heads", "head_dim", "n_groups", "state_size", "expand")
    heads = _read_ssd_heads(raw, hidden, names)
    traits = SSDTraits(
        heads,
        read_taps(raw, "conv_kernel"),
        conv_bias=raw.read(bool, "use_conv_bias", default=True),
        bias=raw.read(bool, "use_bias", default=False),
    )
    raw.read_choice(("silu",), "hidden_act", default="silu")
    tied = raw.read(bool, "tie_word_embeddings", default=False)
    has_state = (True,) * num_layers
    copied_states, copied_inputs = traits.copied(has_state)
    return ModelSpec(
        **common,
        intermediate_size=0,
        activation="silu",
        norm_eps=raw.read(float, "layer_norm_epsilon", default=1e-5),
        max_context=raw.read_size("max_position_embeddings", default=MAMBA_CONTEXT),
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=traits,
        parameters=ParameterCounts(
            embedding=vocab * hidden,
            layer=traits.parameters(hidden) + hidden,
            head=hidden + (0 if tied else vocab * hidden),
        ),
        matrices=(*_matrices(heads, hidden, num_layers), MatrixShape(vocab, hidden, is_head=True)),
        eos_token_ids=raw.read_ids("eos_token_id"),
        states=traits.states(has_state),
        wide_states=traits.wide_states(has_state),
        state_inputs=traits.state_inputs(has_state),
        copied_states=copied_states,
        copied_inputs=copied_inputs,
        mixer_size=traits.mixer_size,
    )


def read_granite_hybrid(raw: RawConfig, dtype: str) -> tuple[RawConfig, ModelSpec]:
    """Granite 4 as if no layer had experts, and its config with the defaults of `transformers`.
    Layers have states where `layer_types` does not name attention; these see no positions unless
    the file says rope."""
    raw = _with_plain_names(raw.with_defaults(_GRANITE))
    raw.read_choice(("silu",), "hidden_act", default="silu")  # of the states too
    num_layers, hidden = read_num_layers(raw), raw.read_size("hidden_size")
    layer_types = read_layer_types(raw, num_layers, (LINEAR,) * num_layers, LINEAR)
    is_gguf = raw.has(SPLIT_MLP)
    has_rope = raw.read(bool, HAS_ROPE, default=True) if is_gguf else _has_rope(raw)
    others = raw.read_size("intermediate_size") if is_gguf else 1024
    inner = raw.read_size("shared_intermediate_size", default=others)
    spec = read_granite(raw.overridden({"intermediate_size": inner}), dtype)
    granite = spec.traits
    assert isinstance(granite, LlamaTraits), "Granite without states is of Llama's shape"
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_expand")
    heads = _read_ssd_heads(raw, hidden, names)
    traits = SSDTraits(
        heads,
        read_taps(raw, "mamba_d_conv"),
        conv_bias=raw.read(bool, "mamba_conv_bias", default=True),
        bias=raw.read(bool, "mamba_proj_bias", default=False),
        granite=granite,
        fused_mlp=not is_gguf,
    )
    has_state = tuple(kind == LINEAR for kind in layer_types)
    return raw, _with_states(spec, traits, has_state, has_rope=has_rope)


def _has_rope(raw: RawConfig) -> bool:
    position = raw.read_optional(str, "position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise raw.unsupported("position_embedding_type", position, ("rope", "nope", "null"))
    return position == "rope"


def _with_states(
    spec: ModelSpec, traits: SSDTraits, has_state: tuple[bool, ...], *, has_rope: bool
) -> ModelSpec:
    """Put states in place of the attention of some layers."""
    hidden, count = spec.hidden_size, sum(has_state)
    attending = spec.num_layers - count
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    granite = traits.granite
    assert granite is not None
    of_attention = hidden * (2 * q_size + 2 * kv_size)
    of_attention += granite.qkv_bias * (q_size + 2 * kv_size) + granite.o_bias * hidden
    more = count * (traits.parameters(hidden) - of_attention)
    qkv, output, *others = spec.matrices
    matrices = (replace(qkv, count=attending), replace(output, count=attending))
    ropes = tuple(
        rope if has_rope and not state else None
        for rope, state in zip(spec.ropes, has_state, strict=True)
    )
    copied_states, copied_inputs = traits.copied(has_state)
    return replace(
        spec,
        traits=traits,
        ropes=ropes,
        parameters=replace(spec.parameters, extra=spec.parameters.extra + more),
        matrices=(*matrices, *_matrices(traits.heads, hidden, count), *others),
        states=traits.states(has_state),
        wide_states=traits.wide_states(has_state),
        state_inputs=traits.state_inputs(has_state),
        copied_states=copied_states,
        copied_inputs=copied_inputs,
        mixer_size=max(traits.mixer_size, 3 * q_size + 4 * kv_size) if count else 0,
    )


def _matrices(heads: SSDHeads, hidden: int, count: int) -> tuple[MatrixShape, ...]:
    shapes = (MatrixShape(heads.inputs, hidden, count), MatrixShape(hidden, heads.inner, count))
    return shapes if count else ()


def _with_plain_names(raw: RawConfig) -> RawConfig:
    """Return the config with `layer_types` in the words of `transformers`: files have "mamba" and
    "attention", also under `layers_block_type`."""
    types = raw.read_list(str, "layer_types") or raw.read_list(str, "layers_block_type")
    if types is None:
        return raw
    plain = {"mamba": LINEAR, "attention": FULL}
    return raw.overridden({"layer_types": [plain.get(kind, kind) for kind in types]})


def _read_ssd_heads(raw: RawConfig, hidden: int, names: tuple[str, ...]) -> SSDHeads:
    """names: keys of the number of heads, their size, groups, the state's size, and the factor on
    the hidden size."""
    of_heads, of_dim, of_groups, of_state, of_factor = names
    num_heads, num_groups = raw.read_size(of_heads), raw.read_size(of_groups)
    is_told = raw.has(INNER_SIZE)
    inner = raw.read_size(INNER_SIZE) if is_told else raw.read_size(of_factor) * hidden
    is_stated = not is_told and raw.has(of_dim) and raw.as_dict()[of_dim] != "auto"
    head_dim = raw.read_size(of_dim) if is_stated else inner // num_heads
    state_size = raw.read_size(of_state)
    if num_heads * head_dim != inner:
        raise ConfigError(
            f"{raw.source}: {of_heads}={num_heads} of {of_dim}={head_dim} are not the inner size "
            f"of {inner}, which is {of_factor} · hidden_size"
        )
    if num_heads % num_groups:
        raise ConfigError(
            f"{raw.source}: {of_heads}={num_heads} is not a multiple of {of_groups}={num_groups}"
        )
    if head_dim % COLUMNS or state_size % 4 or state_size > MAX_STATE_SIZE:
        raise ConfigError(
            f"{raw.source}: {of_dim}={head_dim}, {of_state}={state_size}; quire takes multiples of "
            f"{COLUMNS}, and multiples of 4 up to {MAX_STATE_SIZE}"
        )
    return SSDHeads(num_heads, head_dim, num_groups, state_size, _read_step_limits(raw))


def _read_step_limits(raw: RawConfig) -> tuple[float, float]:
    """Least and most of a step. Files write infinity as a number or as an object."""
    stated = raw.as_dict().get("time_step_limit")
    if isinstance(stated, list):
        given = cast("list[object]", stated)
        finite = [_LARGEST if each in (inf, _INFINITY) else each for each in given]
        raw = raw.overridden({"time_step_limit": finite})
    limits = raw.read_list(float, "time_step_limit") or (0.0, _LARGEST)
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise ConfigError(
            f"{raw.source}: time_step_limit={list(limits)} must be two numbers, the least first"
        )
    return limits[0], min(limits[1], _LARGEST)


_SSM = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a.weight": "A_log",
    "ssm_d.weight": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def _ssm_block(prefix: str) -> dict[str, str]:
    return {name: f"{prefix}.{place}" for name, place in _SSM.items()}


_GRANITE_MLP = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
_GRANITE_BLOCK: Mapping[str, str] = MappingProxyType(
    {
        **expert_block("block_sparse_moe.router.layer", "block_sparse_moe.experts", PROJECTIONS),
        **BLOCK,
        **_GRANITE_MLP,
        **{f"{name}_shexp": place for name, place in _GRANITE_MLP.items()},
        **_ssm_block("mamba"),
    }
)
GRANITE_GGUF = GGUFNames(
    "granitehybrid",
    _GRANITE_BLOCK,
    pairs_heads=True,
    numbers={
        **GRANITE_NUMBERS,
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        INNER_SIZE: "ssm.inner_size",
        HAS_ROPE: "rope.scaling.finetuned",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    constants={SPLIT_MLP: True, "num_local_experts": 0},
    rest_type=LINEAR,
)
MAMBA_GGUF = GGUFNames(
    "mamba2",
    {"attn_norm": "norm", **_ssm_block("mixer")},
    numbers={
        "conv_kernel": "ssm.conv_kernel",
        "state_size": "ssm.state_size",
        "num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        INNER_SIZE: "ssm.inner_size",
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    },
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    blocks="backbone.layers.{}.",
)

SSD_MODEL = "quire.compute.models.hybrid:SSDModel"

FAMILIES = (Family("Mamba 2", SSD_MODEL, "mamba2", {"Mamba2ForCausalLM": read_mamba2}, MAMBA_GGUF),)
