"""LFM2's config.json to `ModelSpec`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.config.families.family import Family
from quire.config.families.gguf_names import GGUFNames
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
from quire.config.model_spec import MatrixShape, ModelSpec, ParameterCounts

__all__ = ["FAMILIES", "GGUF_NAMES", "LFM2Traits", "read_lfm2"]

CONV = "conv"


@dataclass(frozen=True, slots=True)
class LFM2Traits:
    """conv_taps: tokens that a convolution sees, its own included. conv_bias: whether the
    convolution and the projections around it have a bias."""

    conv_taps: int
    conv_bias: bool


def read_lfm2(raw: RawConfig, dtype: str) -> ModelSpec:
    """Layers are convolutions where `layer_types` or `full_attn_idxs` does not name attention."""
    raw = raw.with_defaults({"rope_theta": 1e6, "num_key_value_heads": 8, "conv_L_cache": 3})
    hidden, num_layers = raw.read_size("hidden_size"), read_num_layers(raw)
    num_heads, num_kv_heads, head_dim = heads = read_heads(raw, hidden)
    common = read_common(raw, dtype, "lfm2", hidden, num_layers, heads)
    attend = raw.read_list(int, "full_attn_idxs")
    attend = range(num_layers) if attend is None else attend
    by_index = tuple(FULL if layer in attend else CONV for layer in range(num_layers))
    layer_types = read_hybrid_layer_types(raw, num_layers, by_index, CONV)
    num_conv = layer_types.count(CONV)
    num_attention = num_layers - num_conv
    taps = read_taps(raw, "conv_L_cache")
    bias = raw.read(bool, "conv_bias", default=False)
    inner, vocab = _read_inner_size(raw), common["vocab_size"]
    tied = raw.read(bool, "tie_embedding", "tie_word_embeddings", default=True)
    max_positions = raw.read_size("max_position_embeddings", default=128000)
    ropes, max_context = read_hybrid_ropes(raw, layer_types, head_dim, max_positions)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    of_attention = hidden * (2 * q_size + 2 * kv_size) + 2 * head_dim
    of_conv = hidden * (4 * hidden + taps) + 5 * hidden * bias
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation="silu",
        norm_eps=raw.read(float, "norm_eps", "block_norm_eps", default=1e-5),
        max_context=max_context,
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=ropes,
        traits=LFM2Traits(taps, bias),
        parameters=ParameterCounts(
            embedding=vocab * hidden,
            layer=3 * hidden * inner + 2 * hidden,
            head=hidden + (0 if tied else vocab * hidden),
            extra=num_attention * of_attention + num_conv * of_conv,
        ),
        matrices=(
            MatrixShape(q_size + 2 * kv_size, hidden, num_attention),
            MatrixShape(hidden, q_size, num_attention),
            MatrixShape(3 * hidden, hidden, num_conv),
            MatrixShape(hidden, hidden, num_conv),
            MatrixShape(2 * inner, hidden, num_layers),
            MatrixShape(hidden, inner, num_layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        eos_token_ids=raw.read_ids("eos_token_id"),
        states=tuple((taps - 1) * hidden * (kind == CONV) for kind in layer_types),
        state_inputs=3 * hidden * num_conv,
    )


def _read_inner_size(raw: RawConfig) -> int:
    """Two thirds of the stated size, times a factor, rounded up, unless the file says it is as
    stated."""
    stated = raw.read_size("block_ff_dim", "intermediate_size", default=12288)
    if not raw.read(bool, "block_auto_adjust_ff_dim", default=True):
        return stated
    factor = raw.read_optional(float, "block_ffn_dim_multiplier")
    multiple = raw.read_size("block_multiple_of", default=256)
    if factor is None and "block_ffn_dim_multiplier" in raw.as_dict():  # null: neither
        return int(2 * stated / 3)
    inner = int((1.0 if factor is None else factor) * int(2 * stated / 3))
    return math.ceil(inner / multiple) * multiple


_BLOCK = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

GGUF_NAMES = GGUFNames(
    "lfm2",
    _BLOCK,
    numbers={
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "conv_L_cache": "shortconv.l_cache",
    },
    constants={"block_auto_adjust_ff_dim": False},
    outer={
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
    },
    rest_type=CONV,
)

FAMILIES = (
    Family(
        "LFM2",
        "quire.compute.models.hybrid:LFM2Model",
        "lfm2",
        {"Lfm2ForCausalLM": read_lfm2},
        GGUF_NAMES,
    ),
)
