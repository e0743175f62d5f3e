"""config.json of ERNIE 4.5 to a `ModelSpec`. Nothing here imports torch: planning needs none."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import MatrixShape, ModelSpec, ParameterCounts, RawConfig
from quire.config.rope import read_ropes

__all__ = ["ErnieTraits", "read_ernie"]


@dataclass(frozen=True, slots=True)
class ErnieTraits:
    """Facts that `model.py` alone reads. bias: projections have one."""

    bias: bool


def read_ernie(raw: RawConfig, dtype: str) -> ModelSpec:
    """Read every key that changes what the model computes. Raises ConfigError, naming file, key and
    value, for what `model.py` does not compute; a key that is silently ignored gives wrong texts.
    """
    hidden, inner = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    layers, vocab = raw.read_size("num_hidden_layers"), raw.read_size("vocab_size")
    heads = raw.read_size("num_attention_heads")
    kv_heads = raw.read_size("num_key_value_heads", default=heads)
    head_dim = raw.read_size("head_dim", default=hidden // heads)
    positions = raw.read_size("max_position_embeddings", default=131072)
    bias = raw.read(bool, "use_bias", default=False)
    tied = raw.read(bool, "tie_word_embeddings", default=True)
    kinds = ("full_attention",) * layers
    queries, keys = heads * head_dim, kv_heads * head_dim
    biases = bias * (queries + 2 * keys + 2 * hidden + 2 * inner)
    layer = hidden * (2 * queries + 2 * keys + 3 * inner + 2) + biases
    return ModelSpec(
        architecture="",  # quire fills it in
        model_type="ernie4_5",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation=raw.read_choice(("silu", "gelu", "relu"), "hidden_act", default="silu"),
        norm_eps=raw.read(float, "rms_norm_eps", default=1e-5),
        max_context=positions,
        tie_word_embeddings=tied,
        dtype=dtype,
        windows=(None,) * layers,  # per layer: full attention
        ropes=read_ropes(raw, kinds, head_dim, positions, theta=5e5),
        traits=ErnieTraits(bias),
        # For the memory plan, where no files say it:
        parameters=ParameterCounts(vocab * hidden, layer, hidden + (not tied) * vocab * hidden),
        # Matrices that `quantization` may quantize, merged as the layers merge it:
        matrices=(
            MatrixShape(queries + 2 * keys, hidden, layers),
            MatrixShape(hidden, queries, layers),
            MatrixShape(2 * inner, hidden, layers),
            MatrixShape(hidden, inner, layers),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        eos_token_ids=raw.read_ids("eos_token_id"),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )
