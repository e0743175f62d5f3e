"""The GPT lineage: GPT-2 and OPT, with learned positions, and GPT-NeoX."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.families.family import Family
from quire.config.families.llama import read_llama_like
from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    plain_block_matrices,
    read_common,
    read_heads,
    read_num_layers,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import LlamaTraits, MatrixShape, ModelSpec, ParameterCounts

__all__ = ["FAMILIES", "GPT2Traits", "GPTNeoXTraits", "OPTTraits", "read_opt"]


@dataclass(frozen=True, slots=True)
class OPTTraits:
    """OPT: norm before or after each sublayer; embeddings may be narrower than the layers."""

    norm_before: bool
    final_norm: bool
    norm_affine: bool
    bias: bool
    embed_size: int


@dataclass(frozen=True, slots=True)
class GPT2Traits:
    """GPT-2: the factor on q·k, per layer."""

    attention_scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GPTNeoXTraits:
    """GPT-NeoX: biases around attention, and whether the MLP stands beside it."""

    attention_bias: bool
    is_parallel: bool


def read_gpt2(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("add_cross_attention", True, "quire serves decoder-only models")
    hidden = raw.read_size("n_embd", "hidden_size")
    num_layers = read_num_layers(raw, "n_layer", "num_hidden_layers")
    common = read_common(raw, dtype, "gpt2", hidden, num_layers, read_heads(raw, hidden))
    positions = raw.read_size("n_positions", "max_position_embeddings", default=1024)
    inner, vocab = raw.read_size("n_inner", default=4 * hidden), common["vocab_size"]
    scale = (
        common["head_dim"] ** -0.5 if raw.read(bool, "scale_attn_weights", default=True) else 1.0
    )
    by_layer = raw.read(bool, "scale_attn_by_inverse_layer_idx", default=False)
    tied = raw.read(bool, "tie_word_embeddings", default=True)
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    head = 2 * hidden + (0 if tied else vocab * hidden)
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation=raw.read_choice(ACTIVATIONS, "activation_function", default="gelu_new"),
        norm_eps=raw.read(float, "layer_norm_epsilon", default=1e-5),
        max_context=positions,
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=GPT2Traits(
            tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers))
        ),
        parameters=ParameterCounts((vocab + positions) * hidden, layer, head),
        matrices=(
            *plain_block_matrices(hidden, inner, num_layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        eos_token_ids=raw.read_ids("eos_token_id"),
    )


def read_opt(raw: RawConfig, dtype: str) -> ModelSpec:
    hidden, ffn = raw.read_size("hidden_size"), raw.read_size("ffn_dim")
    num_layers, heads = read_num_layers(raw), read_heads(raw, hidden)
    common = read_common(raw, dtype, "opt", hidden, num_layers, heads)
    vocab = common["vocab_size"]
    positions = raw.read_size("max_position_embeddings", default=2048)
    norm_before = raw.read(bool, "do_layer_norm_before", default=True)
    traits = OPTTraits(
        norm_before=norm_before,
        final_norm=norm_before and not raw.read(bool, "_remove_final_layer_norm", default=False),
        norm_affine=raw.read(bool, "layer_norm_elementwise_affine", default=True),
        bias=raw.read(bool, "enable_bias", default=True),
        embed_size=raw.read_size("word_embed_proj_dim", default=hidden),
    )
    tied = raw.read(bool, "tie_word_embeddings", default=True)
    narrow = traits.embed_size != hidden
    norm = 2 * hidden * traits.norm_affine
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 2 * norm
    layer += traits.bias * (5 * hidden + ffn)
    head = norm * traits.final_norm + narrow * hidden * traits.embed_size
    head += 0 if tied else vocab * traits.embed_size
    embedding = (vocab + narrow * hidden) * traits.embed_size + (positions + 2) * hidden
    return ModelSpec(
        **common,
        intermediate_size=ffn,
        activation=raw.read_choice(ACTIVATIONS, "activation_function", default="relu"),
        norm_eps=1e-5,
        max_context=positions,
        tie_word_embeddings=tied,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=traits,
        parameters=ParameterCounts(embedding, layer, head),
        matrices=(
            *plain_block_matrices(hidden, ffn, num_layers),
            *(_narrow_matrices(hidden, traits.embed_size) if narrow else ()),
            MatrixShape(vocab, traits.embed_size, is_head=True),
        ),
        eos_token_ids=raw.read_ids("eos_token_id"),
    )


def _narrow_matrices(hidden: int, embed_size: int) -> tuple[MatrixShape, ...]:
    """Return the matrices from narrow embeddings into the layers and back."""
    return MatrixShape(hidden, embed_size), MatrixShape(embed_size, hidden)


def read_gpt_neox(raw: RawConfig, dtype: str) -> ModelSpec:
    """GPT-NeoX and Pythia; older files name the settings of rope otherwise."""
    raw = raw.with_defaults(
        {
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": raw.read(float, "rotary_pct", default=0.25),
            "rope_theta": raw.read(float, "rotary_emb_base", default=1e4),
        }
    )
    num_layers, bias = read_num_layers(raw), raw.read(bool, "attention_bias", default=True)
    spec = read_llama_like(raw, dtype, LlamaTraits(), (FULL,) * num_layers)
    size, inner = spec.hidden_size, spec.intermediate_size
    layer = 4 * size * size + bias * 4 * size + 2 * size * inner + inner + 5 * size
    matrices = plain_block_matrices(size, inner, num_layers)
    return replace(
        spec,
        norm_eps=raw.read(float, "layer_norm_eps"),
        traits=GPTNeoXTraits(bias, raw.read(bool, "use_parallel_residual", default=True)),
        parameters=replace(spec.parameters, layer=layer, head=spec.parameters.head + size),
        matrices=(*matrices, MatrixShape(spec.vocab_size, size, is_head=True)),
    )


FAMILIES = (
    Family("OPT", "quire.compute.models.opt:OPTModel", "opt", {"OPTForCausalLM": read_opt}),
    Family(
        "GPT-NeoX, Pythia",
        "quire.compute.models.gpt_neox:GPTNeoXModel",
        "gpt_neox",
        {"GPTNeoXForCausalLM": read_gpt_neox},
    ),
    Family("GPT-2", "quire.compute.models.gpt2:GPT2Model", "gpt2", {"GPT2LMHeadModel": read_gpt2}),
)
