"""One reader per model family: config.json to `ModelSpec`.

`read_model_spec` is the door; a third party adds an architecture with an entry point of the group
`quire.model_specs` that names a reader `(RawConfig, dtype) -> ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.config.checkpoint import read_checkpoint
from quire.config.families.mpt import read_mpt
from quire.config.generation import read_generation_defaults
from quire.config.hf import RawConfig, read_json
from quire.config.model_spec import (
    DTYPE_BYTES,
    Gemma2Traits,
    GPT2Traits,
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    OPTTraits,
    ParameterCounts,
)
from quire.config.rope import extended_context, read_ropes
from quire.errors import ConfigError

__all__ = ["SUPPORTED_ARCHITECTURES", "SpecReader", "read_model_spec"]

SpecReader = Callable[[RawConfig, str], ModelSpec]

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
USUAL_DTYPE = "bfloat16"
"""Of models that say nothing of it and have no weights here, as `load_format="dummy"` allows."""


def read_model_spec(folder: Path) -> ModelSpec:
    """Parse config.json and generation_config.json of a checkpoint folder.

    Raises ConfigError, naming file, key and value, for anything that quire cannot serve.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no config.json; give the folder of a Hugging Face style checkpoint"
        )
    raw = read_json(path)
    architecture, reader = _find_reader(raw)
    quantization = raw.section("quantization_config")
    if quantization is not None:
        method = quantization.read(str, "quant_method", default="unknown")
        raise ConfigError(
            f"{path}: quantization_config.quant_method={method!r} is not supported; "
            "use the checkpoint of the same model without quantization"
        )
    spec = reader(raw, _read_dtype(raw, folder))
    generation = read_generation_defaults(folder)
    eos = dict.fromkeys(spec.eos_token_ids + generation.eos_token_ids)
    return replace(spec, architecture=architecture, generation=generation, eos_token_ids=tuple(eos))


def _find_reader(raw: RawConfig) -> tuple[str, SpecReader]:
    architectures = raw.read_list(str, "architectures") or ("not stated",)
    name = architectures[0]
    if name in _READERS:
        return name, _READERS[name]
    from importlib.metadata import entry_points  # 50 ms that known models need not spend

    third_party = {point.name: point for point in entry_points(group="quire.model_specs")}
    if name in third_party:
        return name, third_party[name].load()
    known = ", ".join(sorted({*_READERS, *third_party}))
    raise ConfigError(f"{raw.source}: architecture {name} is not supported; quire serves {known}")


def _read_dtype(raw: RawConfig, folder: Path) -> str:
    stated = raw.read_optional(str, "dtype", "torch_dtype")
    if stated is not None:
        stated = stated.removeprefix("torch.")
        if stated in DTYPE_BYTES:
            return stated
        raise raw.unsupported("dtype", stated, DTYPE_BYTES)
    if not any(folder.glob("*.safetensors*")):
        return USUAL_DTYPE
    counts: dict[str, int] = {}
    for tensor in read_checkpoint(folder).tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_bytes
    most = max(counts, key=lambda dtype: counts[dtype], default="F32")
    if most not in SAFETENSORS_DTYPES:
        raise raw.unsupported("dtype of the weights", most, SAFETENSORS_DTYPES)
    return SAFETENSORS_DTYPES[most]


def _read_heads(raw: RawConfig, hidden_size: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim."""
    num_heads = raw.read_size("num_attention_heads", "n_head")
    num_kv_heads = raw.read_size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{raw.source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if not raw.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(
            f"{raw.source}: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}; state head_dim"
        )
    return num_heads, num_kv_heads, raw.read_size("head_dim", default=hidden_size // num_heads)


def _read_layer_types(raw: RawConfig, num_layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    layer_types = raw.read_list(str, "layer_types")
    if layer_types is None:
        return default
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"{raw.source}: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise raw.unsupported("layer_types", kind, (FULL, SLIDING))
    return layer_types


def _mistral_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """All layers slide if there is a window, unless `layer_types` says which (Ministral)."""
    kind = SLIDING if raw.has("sliding_window") else FULL
    return _read_layer_types(raw, num_layers, (kind,) * num_layers)


def _qwen_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`."""
    first = num_layers
    if raw.read(bool, "use_sliding_window", default=False) and raw.has("sliding_window"):
        first = raw.read(int, "max_window_layers", default=28)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return _read_layer_types(raw, num_layers, default)


def _read_windows(
    raw: RawConfig, layer_types: tuple[str, ...], max_context: int
) -> tuple[int | None, ...]:
    """Per layer; a window that no context can outgrow is full attention."""
    if SLIDING not in layer_types:
        return (None,) * len(layer_types)
    window = raw.read_size("sliding_window")
    sliding = window if window < max_context else None
    return tuple(sliding if kind == SLIDING else None for kind in layer_types)


def _read_llama_like(
    raw: RawConfig,
    dtype: str,
    traits: LlamaTraits,
    layer_types: tuple[str, ...],
    *,
    tied: bool = False,
) -> ModelSpec:
    """tied: whether the LM head is the embedding where the file does not say."""
    hidden, intermediate = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    num_heads, num_kv_heads, head_dim = _read_heads(raw, hidden)
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
        windows=_read_windows(raw, layer_types, max_context),
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


def _read_llama(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", "bias", default=False)
    mlp_bias = raw.read(bool, "mlp_bias", default=False)
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return _read_llama_like(raw, dtype, traits, (FULL,) * raw.read_size("num_hidden_layers"))


def _read_mistral(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _mistral_layer_types(raw, raw.read_size("num_hidden_layers"))
    return _read_llama_like(raw, dtype, LlamaTraits(), layer_types)


def _read_qwen2(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _qwen_layer_types(raw, raw.read_size("num_hidden_layers"))
    return _read_llama_like(raw, dtype, LlamaTraits(qkv_bias=True), layer_types)


def _read_qwen3(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", default=False)
    layer_types = _qwen_layer_types(raw, raw.read_size("num_hidden_layers"))
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm=True)
    return _read_llama_like(raw, dtype, traits, layer_types)


def _read_gemma2(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("use_bidirectional_attention", True, "quire serves decoder-only models")
    num_layers = raw.read_size("num_hidden_layers")
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    layer_types = _read_layer_types(raw, num_layers, alternating)
    bias = raw.read(bool, "attention_bias", default=False)
    score_cap = raw.read_optional(float, "attn_logit_softcapping")
    as_llama = LlamaTraits(qkv_bias=bias, o_bias=bias)
    spec = _read_llama_like(raw, dtype, as_llama, layer_types, tied=True)
    counts = spec.parameters
    return replace(
        spec,
        activation=raw.read_choice(
            ACTIVATIONS, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        traits=Gemma2Traits(
            bias,
            raw.read_size("query_pre_attn_scalar", default=256) ** -0.5,
            score_cap,
            raw.read_optional(float, "final_logit_softcapping"),
        ),
        parameters=replace(counts, layer=counts.layer + 2 * spec.hidden_size),
        score_options=frozenset({"soft_cap"} if score_cap is not None else ()),
    )


def _read_opt(raw: RawConfig, dtype: str) -> ModelSpec:
    hidden, ffn = raw.read_size("hidden_size"), raw.read_size("ffn_dim")
    num_heads, num_kv_heads, head_dim = _read_heads(raw, hidden)
    num_layers, vocab = raw.read_size("num_hidden_layers"), raw.read_size("vocab_size")
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
        architecture="",
        model_type=raw.read(str, "model_type", default="opt"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=raw.read_choice(ACTIVATIONS, "activation_function", default="relu"),
        norm_eps=1e-5,
        max_context=positions,
        tie_word_embeddings=tied,
        dtype=dtype,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=traits,
        parameters=ParameterCounts(embedding, layer, head),
        matrices=(
            *_plain_block_matrices(hidden, ffn, num_layers),
            *(_narrow_matrices(hidden, traits.embed_size) if narrow else ()),
            MatrixShape(vocab, traits.embed_size, is_head=True),
        ),
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        eos_token_ids=raw.read_ids("eos_token_id"),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )


def _plain_block_matrices(hidden: int, inner: int, num_layers: int) -> tuple[MatrixShape, ...]:
    """q, k, v; attention's output; the MLP up and down; as many key heads as query heads."""
    sizes = ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
    return tuple(MatrixShape(outputs, inputs, num_layers) for outputs, inputs in sizes)


def _narrow_matrices(hidden: int, embed_size: int) -> tuple[MatrixShape, ...]:
    """From narrow embeddings into the layers and back."""
    return MatrixShape(hidden, embed_size), MatrixShape(embed_size, hidden)


def _read_gpt2(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("add_cross_attention", True, "quire serves decoder-only models")
    hidden = raw.read_size("n_embd", "hidden_size")
    num_heads, num_kv_heads, head_dim = _read_heads(raw, hidden)
    num_layers = raw.read_size("n_layer", "num_hidden_layers")
    positions = raw.read_size("n_positions", "max_position_embeddings", default=1024)
    inner, vocab = raw.read_size("n_inner", default=4 * hidden), raw.read_size("vocab_size")
    scale = head_dim**-0.5 if raw.read(bool, "scale_attn_weights", default=True) else 1.0
    by_layer = raw.read(bool, "scale_attn_by_inverse_layer_idx", default=False)
    tied = raw.read(bool, "tie_word_embeddings", default=True)
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    head = 2 * hidden + (0 if tied else vocab * hidden)
    return ModelSpec(
        architecture="",
        model_type=raw.read(str, "model_type", default="gpt2"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=raw.read_choice(ACTIVATIONS, "activation_function", default="gelu_new"),
        norm_eps=raw.read(float, "layer_norm_epsilon", default=1e-5),
        max_context=positions,
        tie_word_embeddings=tied,
        dtype=dtype,
        windows=(None,) * num_layers,
        ropes=(None,) * num_layers,
        traits=GPT2Traits(
            tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers))
        ),
        parameters=ParameterCounts((vocab + positions) * hidden, layer, head),
        matrices=(
            *_plain_block_matrices(hidden, inner, num_layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        eos_token_ids=raw.read_ids("eos_token_id"),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )


_READERS: dict[str, SpecReader] = {
    "Gemma2ForCausalLM": _read_gemma2,
    "GPT2LMHeadModel": _read_gpt2,
    "LlamaForCausalLM": _read_llama,
    "LLaMAForCausalLM": _read_llama,
    "MistralForCausalLM": _read_mistral,
    "MptForCausalLM": read_mpt,
    "MPTForCausalLM": read_mpt,
    "OPTForCausalLM": _read_opt,
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
}
SUPPORTED_ARCHITECTURES = tuple(sorted(_READERS))
