"""The Llama lineage: Llama, Mistral, Qwen 2 and Qwen 3."""

from __future__ import annotations

from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_windows,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import LlamaTraits, MatrixShape, ModelSpec, ParameterCounts
from quire.config.rope import extended_context, read_ropes

__all__ = ["read_llama", "read_llama_like", "read_mistral", "read_qwen2", "read_qwen3"]


def read_llama(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", "bias", default=False)
    mlp_bias = raw.read(bool, "mlp_bias", default=False)
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_mistral(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _mistral_layer_types(raw, read_num_layers(raw))
    return read_llama_like(raw, dtype, LlamaTraits(), layer_types)


def read_qwen2(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _qwen_layer_types(raw, read_num_layers(raw))
    return read_llama_like(raw, dtype, LlamaTraits(qkv_bias=True), layer_types)


def read_qwen3(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", default=False)
    layer_types = _qwen_layer_types(raw, read_num_layers(raw))
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm=True)
    return read_llama_like(raw, dtype, traits, layer_types)


def read_llama_like(
    raw: RawConfig,
    dtype: str,
    traits: LlamaTraits,
    layer_types: tuple[str, ...],
    *,
    tied: bool = False,
) -> ModelSpec:
    """tied: whether the LM head is the embedding where the file does not say."""
    hidden, intermediate = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    num_heads, num_kv_heads, head_dim = read_heads(raw, hidden)
    max_positions = raw.read_size("max_position_embeddings", default=2048)
    vocab = raw.read_size("vocab_size")
    tied = raw.read(bool, "tie_word_embeddings", default=tied)
    ropes = read_ropes(raw, layer_types, head_dim, max_positions)
    max_context = min(extended_context(rope, max_positions) for rope in ropes)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 3 * hidden * intermediate + 2 * hidden
    layer += traits.qkv_bias * (q_size + 2 * kv_size) + traits.o_bias * hidden
    layer += traits.mlp_bias * (2 * intermediate + hidden) + traits.qk_norm * 2 * head_dim
    head = hidden + (0 if tied else vocab * hidden)
    return ModelSpec(
        architecture="",
        model_type=raw.read(str, "model_type", default="llama"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=raw.read_choice(ACTIVATIONS, "hidden_act", default="silu"),
        norm_eps=raw.read(float, "rms_norm_eps", default=1e-6),
        max_context=max_context,
        tie_word_embeddings=tied,
        dtype=dtype,
        windows=read_windows(raw, layer_types, max_context),
        ropes=ropes,
        traits=traits,
        parameters=ParameterCounts(vocab * hidden, layer, head),
        matrices=(
            MatrixShape(q_size + 2 * kv_size, hidden, len(layer_types)),
            MatrixShape(hidden, q_size, len(layer_types)),
            MatrixShape(2 * intermediate, hidden, len(layer_types)),
            MatrixShape(hidden, intermediate, len(layer_types)),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        eos_token_ids=raw.read_ids("eos_token_id"),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )


def _mistral_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """All layers slide if there is a window, unless `layer_types` says which (Ministral)."""
    kind = SLIDING if raw.has("sliding_window") else FULL
    return read_layer_types(raw, num_layers, (kind,) * num_layers)


def _qwen_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`."""
    first = num_layers
    if raw.read(bool, "use_sliding_window", default=False) and raw.has("sliding_window"):
        first = raw.read(int, "max_window_layers", default=28)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return read_layer_types(raw, num_layers, default)
