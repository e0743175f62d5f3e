"""MPT's config.json to `ModelSpec`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.families.family import Family
from quire.config.families.shared import plain_block_matrices, read_common, read_num_layers
from quire.config.hf import RawConfig
from quire.config.model_spec import MatrixShape, ModelSpec, ParameterCounts

__all__ = ["FAMILIES", "MPTTraits", "read_mpt"]

NORMS = ("layernorm", "low_precision_layernorm")
"""The same but for rounding."""


@dataclass(frozen=True, slots=True)
class MPTTraits:
    """MPT: the factor on q·k; -log2 of the last ALiBi slope."""

    attention_scale: float
    max_bias: float


def read_mpt(raw: RawConfig, dtype: str) -> ModelSpec:
    """Raises ConfigError for what `transformers` does not compute either (some of which it passes
    over in silence), and clipped q, k, v.

    `alibi_bias_max` is what the model was trained with; `transformers` takes 8 in any case."""
    raw.reject("no_bias", False, "quire serves MPT without biases")
    raw.read_choice(NORMS, "norm_type", default="layernorm")
    if (scale_of_logits := raw.read_optional(object, "logit_scale")) is not None:
        raise raw.unsupported("logit_scale", scale_of_logits, ("null",))
    attention = raw.section("attn_config")
    max_bias = 8.0
    scale: float | None = None
    if attention is not None:
        attention.reject("alibi", False, "quire serves MPT with ALiBi")
        attention.reject("qk_ln", True, "quire serves MPT without norms on q and k")
        attention.reject("prefix_lm", True, "quire serves decoder-only models")
        attention.read_choice(("multihead_attention",), "attn_type", default="multihead_attention")
        if clip := attention.read_optional(float, "clip_qkv"):
            raise attention.unsupported("clip_qkv", clip, ("null",))
        max_bias = attention.read(float, "alibi_bias_max", default=8.0)
        scale = attention.read_optional(float, "softmax_scale")
    hidden, num_heads = raw.read_size("d_model"), raw.read_size("n_heads")
    if hidden % num_heads:
        raise ConfigError(f"{raw.source}: d_model={hidden} is no multiple of n_heads={num_heads}")
    num_layers, head_dim = read_num_layers(raw, "n_layers"), hidden // num_heads
    common = read_common(raw, dtype, "mpt", hidden, num_layers, (num_heads, num_heads, head_dim))
    vocab = common["vocab_size"]
    inner = hidden * raw.read_size("expansion_ratio", default=4)
    tied = raw.read(bool, "tie_word_embeddings", default=True)
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation="gelu",
        norm_eps=raw.read(float, "layer_norm_epsilon", default=1e-5),
        max_context=raw.read_size("max_seq_len", default=2048),
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=MPTTraits(scale or head_dim**-0.5, max_bias),
        parameters=ParameterCounts(
            embedding=vocab * hidden,
            layer=4 * hidden * hidden + 2 * hidden * inner + 2 * hidden,
            head=hidden + (0 if tied else vocab * hidden),
        ),
        matrices=(
            *plain_block_matrices(hidden, inner, num_layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        score_options=frozenset({"alibi_slopes"}),
        eos_token_ids=raw.read_ids("eos_token_id"),
    )


FAMILIES = (
    Family(
        "MPT",
        "quire.compute.models.mpt:MPTModel",
        "mpt",
        {"MptForCausalLM": read_mpt, "MPTForCausalLM": read_mpt},
    ),
)
