"""config.json of Qwen3-Next and Qwen3.5 to `ModelSpec`: gated delta rules, and attention with gates
in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from quire.base.errors import ConfigError
from quire.config.families.family import Family
from quire.config.families.gguf_names import BLOCK, GGUFNames
from quire.config.families.mtp import QWEN_MTP
from quire.config.families.shared import (
    FULL,
    read_common,
    read_heads,
    read_hybrid_layer_types,
    read_hybrid_ropes,
    read_num_layers,
    read_taps,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    DeltaHeads,
    DeltaLayout,
    MatrixShape,
    ModelSpec,
    ParameterCounts,
)

__all__ = [
    "DELTA",
    "DELTA_LAYOUT",
    "FAMILIES",
    "GGUF_BLOCK",
    "MODEL",
    "QWEN3_5_MOE_TEXT",
    "DeltaTraits",
    "delta_gguf",
    "read_delta",
]

DELTA = "linear_attention"
DELTA_LAYOUT = "delta_layout"
"""Key of the layout of heads in GGUF files, which folders have not."""

MAX_KEY_DIM, COLUMNS = 256, 16
"""The kernel's limit, and its unit of values (csrc/recurrent/gated_delta.cpp); models have 128."""

_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_NOT_IN_CLASS = {"partial_rotary_factor": 0.25}
"""Values that these families mean where the file is silent."""

_QWEN3_5_TEXT = {
    **_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN3_5_MOE_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        **_DEFAULTS,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
)
"""Values of the text part of Qwen3.5 with experts where the file is silent."""


@dataclass(frozen=True, slots=True)
class DeltaTraits:
    """taps: tokens that a convolution sees, its own included."""

    heads: DeltaHeads
    taps: int


def read_delta(raw: RawConfig, dtype: str, layout: DeltaLayout = "parts") -> ModelSpec:
    """Layers attend where `layer_types` says so, or every fourth one does. layout: layout
    of `DeltaHeads` in folders."""
    raw = raw.with_defaults({**_DEFAULTS, **_NOT_IN_CLASS})
    hidden, num_layers = raw.read_size("hidden_size"), read_num_layers(raw)
    num_heads, num_kv_heads, head_dim = of_heads = read_heads(raw, hidden)
    common = read_common(raw, dtype, "qwen3_next", hidden, num_layers, of_heads)
    interval = raw.read_size("full_attention_interval", default=4)
    in_turns = tuple(DELTA if (i + 1) % interval else FULL for i in range(num_layers))
    layer_types = read_hybrid_layer_types(raw, num_layers, in_turns, DELTA)
    num_delta = layer_types.count(DELTA)
    num_attention = num_layers - num_delta
    heads = _read_delta_heads(raw, layout)
    taps = read_taps(raw, "linear_conv_kernel_dim")
    if raw.read(bool, "attention_bias", default=False):
        raise raw.unsupported("attention_bias", value=True, supported=("false",))
    inner, vocab = raw.read_size("intermediate_size", default=5632), common["vocab_size"]
    tied = raw.read(bool, "tie_word_embeddings", default=False)
    max_positions = raw.read_size("max_position_embeddings")
    ropes, max_context = read_hybrid_ropes(raw, layer_types, head_dim, max_positions)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    values = heads.num_values * heads.value_dim
    of_attention = hidden * (3 * q_size + 2 * kv_size) + 2 * head_dim
    of_delta = hidden * (heads.channels + 2 * values + 2 * heads.num_values)
    of_delta += heads.channels * taps + 2 * heads.num_values + heads.value_dim
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation=raw.read_choice(("silu",), "hidden_act", default="silu"),
        norm_eps=raw.read(float, "rms_norm_eps"),
        max_context=max_context,
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=ropes,
        traits=DeltaTraits(heads, taps),
        parameters=ParameterCounts(
            embedding=vocab * hidden,
            layer=3 * hidden * inner + 2 * hidden,
            head=hidden + (0 if tied else vocab * hidden),
            extra=num_attention * of_attention + num_delta * of_delta,
        ),
        matrices=(
            MatrixShape(2 * q_size + 2 * kv_size, hidden, num_attention),
            MatrixShape(hidden, q_size, num_attention),
            MatrixShape(heads.channels + values, hidden, num_delta),
            MatrixShape(hidden, values, num_delta),
            MatrixShape(2 * inner, hidden, num_layers),
            MatrixShape(hidden, inner, num_layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        eos_token_ids=raw.read_ids("eos_token_id"),
        states=_of_delta(layer_types, (taps - 1) * heads.channels),
        wide_states=_of_delta(layer_types, heads.state),
        state_inputs=2 * (heads.channels + heads.num_values) * num_delta,
        mixer_size=max(2 * heads.channels + 3 * values, 6 * q_size + 4 * kv_size),
        mtp_layers=(QWEN_MTP.start,),
    )


def _of_delta(layer_types: tuple[str, ...], size: int) -> tuple[int, ...]:
    """Return `size` for each layer with a rule, 0 for others; () if none has one."""
    return tuple(size * (kind == DELTA) for kind in layer_types) if DELTA in layer_types else ()


def _read_delta_heads(raw: RawConfig, layout: DeltaLayout) -> DeltaHeads:
    keys, values = (raw.read_size(f"linear_num_{part}_heads") for part in ("key", "value"))
    key_dim, value_dim = (raw.read_size(f"linear_{part}_head_dim") for part in ("key", "value"))
    if values % keys:
        raise ConfigError(
            f"{raw.source}: linear_num_value_heads={values} is not a multiple of "
            f"linear_num_key_heads={keys}"
        )
    if key_dim > MAX_KEY_DIM or key_dim % 4 or value_dim % COLUMNS:
        raise ConfigError(
            f"{raw.source}: linear_key_head_dim={key_dim}, linear_value_head_dim={value_dim}; "
            f"quire takes multiples of 4 up to {MAX_KEY_DIM}, and multiples of {COLUMNS}"
        )
    stated = raw.read_optional(str, DELTA_LAYOUT)
    known = {each: each for each in get_args(DeltaLayout)}
    return DeltaHeads(keys, values, key_dim, value_dim, known.get(stated, layout))


GGUF_BLOCK: Mapping[str, str] = MappingProxyType(
    {
        **BLOCK,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a.weight": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
"""Names of a block's tensors in GGUF files."""


def delta_gguf(name: str, block: Mapping[str, str]) -> GGUFNames:
    """Return the names in GGUF files of a family, as `GGUFNames`."""
    numbers = {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "full_attention_interval": "full_attention_interval",
    }
    return GGUFNames(
        name,
        block,
        adds_one=True,
        plain_norms=("ssm_norm",),
        partly_rotated=True,
        ropes=("dimension_sections",),
        numbers=numbers,
        rest_type=DELTA,
        mtp=QWEN_MTP,
    )


MODEL = "quire.compute.models.hybrid:Qwen3NextModel"

FAMILIES = (
    Family(
        "Qwen3.5, text",
        MODEL,
        "qwen3_5_text",
        {"Qwen3_5ForCausalLM": read_delta},
        delta_gguf("qwen35", GGUF_BLOCK),
        _QWEN3_5_TEXT,
    ),
)
