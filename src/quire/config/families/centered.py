"""Families whose norms are layer norms: StarCoder 2, StableLM, Nemotron, Falcon and Bloom."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire.base.errors import ConfigError
from quire.config.families.family import Family
from quire.config.families.llama import read_llama_like
from quire.config.families.shared import FULL, SLIDING, read_num_layers
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    CenteredTraits,
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    ParameterCounts,
)

__all__ = ["FAMILIES", "read_centered"]

_STABLELM = {
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 0,
}
_STARCODER2 = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "eos_token_id": 50256,
}
_NEMOTRON = {
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "eos_token_id": 3,
}
_FALCON = {
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 11,
}
_BLOOM = {"layer_norm_epsilon": 1e-5, "eos_token_id": 2}
"""Values that these families mean where the file is silent."""


def read_stablelm(raw: RawConfig, dtype: str) -> ModelSpec:
    """StableLM 2 and 3B; attention and MLP may stand side by side over one norm."""
    raw.reject("qk_layernorm", True, "quire has no layer norms on heads")
    raw = raw.with_defaults(_STABLELM)
    traits = CenteredTraits(
        "stablelm",
        qkv_bias=raw.read(bool, "use_qkv_bias", default=False),
        gated=True,
        mlp_input="shared" if raw.read(bool, "use_parallel_residual", default=False) else "after",
    )
    return read_centered(raw, dtype, traits, "layer_norm_eps")


def read_starcoder2(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "use_bias", default=True)
    traits = CenteredTraits("starcoder2", qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    raw = raw.with_defaults(_STARCODER2)
    slides = raw.has("sliding_window")
    return read_centered(raw, dtype, traits, "norm_epsilon", tied=True, slides=slides)


def read_nemotron(raw: RawConfig, dtype: str) -> ModelSpec:
    """Nemotron 3 and 4, and Minitron: weights of norms lack the 1 that is added to them."""
    bias = raw.read(bool, "attention_bias", default=False)
    traits = CenteredTraits(
        "nemotron",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.read(bool, "mlp_bias", default=False),
        norm_offset=1.0,
    )
    return read_centered(raw.with_defaults(_NEMOTRON), dtype, traits, "norm_eps")


def read_falcon(raw: RawConfig, dtype: str) -> ModelSpec:
    """Falcon 7B, whose heads share one k and v; 40B and later, with groups of heads; RW, with ALiBi
    and the MLP behind attention."""
    hidden = raw.read_size("hidden_size", "n_embed")
    heads = raw.read_size("num_attention_heads", "n_head")
    is_new = raw.read(bool, "new_decoder_architecture", default=False)
    is_parallel = raw.read(bool, "parallel_attn", default=True)
    norms = raw.read_size("num_ln_in_parallel_attn", default=2 if is_new else 1)
    if norms not in (1, 2) or (norms == 2 and not is_new) or (is_new and not is_parallel):
        raise ConfigError(
            f"{raw.source}: num_ln_in_parallel_attn={norms} and parallel_attn={is_parallel} with "
            f"new_decoder_architecture={is_new} are not supported; 1 and true are with both, 2 and "
            "true with true, 1 and false with false"
        )
    if is_new:
        kv_heads = raw.read_size("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if raw.read(bool, "multi_query", default=True) else heads
    bias = raw.read(bool, "bias", default=False)
    alibi = raw.read(bool, "alibi", default=False)
    mlp_input: Literal["after", "shared", "beside"] = "shared" if norms == 1 else "beside"
    traits = CenteredTraits(
        "falcon" if norms == 1 else "falcon_two_norms",
        qkv="fused" if kv_heads == 1 else "head",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlp_input=mlp_input if is_parallel else "after",
        alibi=alibi,
        alibi_scaled=alibi,
    )
    own = {
        "hidden_size": hidden,
        "num_hidden_layers": read_num_layers(raw, "num_hidden_layers", "n_layer"),
        "num_attention_heads": heads,
        "intermediate_size": raw.read_size("ffn_hidden_size", default=4 * hidden),
        "hidden_act": raw.read(str, "activation", default="gelu"),
        "num_key_value_heads": kv_heads,
        "head_dim": None,
    }
    raw = RawConfig({**_FALCON, **raw.as_dict(), **own}, raw.source)
    return read_centered(raw, dtype, traits, "layer_norm_epsilon", tied=True)


def read_bloom(raw: RawConfig, dtype: str) -> ModelSpec:
    """Bloom and BloomZ. Positions come from ALiBi alone, so that the context may be any; the file
    names the trained one."""
    raw.reject("apply_residual_connection_post_layernorm", True, "quire adds to what is not normed")
    hidden = raw.read_size("hidden_size", "n_embed")
    traits = CenteredTraits(
        "bloom",
        qkv="head",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        alibi=True,
    )
    own = {
        "hidden_size": hidden,
        "num_hidden_layers": read_num_layers(raw, "n_layer", "num_hidden_layers"),
        "num_attention_heads": raw.read_size("n_head", "num_attention_heads"),
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": raw.read_size("seq_length", default=2048),
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": None,
        "head_dim": None,
    }
    raw = RawConfig({**_BLOOM, **raw.as_dict(), **own}, raw.source)
    return read_centered(raw, dtype, traits, "layer_norm_epsilon", tied=True)


def read_centered(
    raw: RawConfig,
    dtype: str,
    traits: CenteredTraits,
    eps: str,
    *,
    tied: bool = False,
    slides: bool = False,
) -> ModelSpec:
    """Read what these families share. eps: key of the epsilon of norms. tied: whether the LM head
    is the embedding where the file does not say. slides: whether all layers slide."""
    layer_types = (SLIDING if slides else FULL,) * read_num_layers(raw)
    spec = read_llama_like(raw, dtype, LlamaTraits(), layer_types, tied=tied)
    if traits.alibi:
        spec = replace(
            spec, ropes=(None,) * spec.num_layers, score_options=frozenset({"alibi_slopes"})
        )
    return replace(
        spec,
        norm_eps=raw.read(float, eps),
        traits=traits,
        parameters=_parameters(spec, traits),
        matrices=_matrices(spec, traits),
    )


def _parameters(spec: ModelSpec, traits: CenteredTraits) -> ParameterCounts:
    size, inner = spec.hidden_size, spec.intermediate_size
    outputs = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    up = (1 + traits.gated) * inner
    layer = size * (outputs + spec.num_heads * spec.head_dim + up + inner)
    layer += traits.qkv_bias * outputs + traits.o_bias * size + traits.mlp_bias * (up + size)
    layer += 2 * size * (1 if traits.mlp_input == "shared" else 2)
    embedding = spec.parameters.embedding + 2 * size * traits.embedding_norm
    head = spec.parameters.head + size + spec.vocab_size * traits.head_bias
    return ParameterCounts(embedding, layer, head)


def _matrices(spec: ModelSpec, traits: CenteredTraits) -> tuple[MatrixShape, ...]:
    size, inner, count = spec.hidden_size, spec.intermediate_size, spec.num_layers
    outputs = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return (
        MatrixShape(outputs, size, count),
        MatrixShape(size, spec.num_heads * spec.head_dim, count),
        MatrixShape((1 + traits.gated) * inner, size, count),
        MatrixShape(size, inner, count),
        MatrixShape(spec.vocab_size, size, is_head=True),
    )


_MODEL = "quire.compute.models.centered:CenteredModel"

FAMILIES = (
    Family("StableLM", _MODEL, "stablelm", {"StableLmForCausalLM": read_stablelm}),
    Family("StarCoder 2", _MODEL, "starcoder2", {"Starcoder2ForCausalLM": read_starcoder2}),
    Family("Nemotron, Minitron", _MODEL, "nemotron", {"NemotronForCausalLM": read_nemotron}),
    Family("Falcon", _MODEL, "falcon", {"FalconForCausalLM": read_falcon}),
    Family("Bloom", _MODEL, "bloom", {"BloomForCausalLM": read_bloom}),
)
