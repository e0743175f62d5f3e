"""ModernBERT (Warner et al. 2024, arXiv:2412.13663).

An encoder with rotated positions, of whose layers most see a window around each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.families.encoders.classes import read_classes
from quire.config.families.family import Family
from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    plain_block_matrices,
    read_common,
    read_heads,
    read_layer_types,
    read_num_layers,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import ClassesSpec, ModelSpec, ParameterCounts
from quire.config.rope import RopeSpec, read_ropes

__all__ = ["FAMILIES", "ModernBertTraits"]


@dataclass(frozen=True, slots=True)
class ModernBertTraits:
    """ModernBERT: biases of attention, of the MLP and of norms, and of the head for classes its
    activation and whether its dense layer has a bias."""

    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    head_activation: str
    head_bias: bool


def read_modernbert(raw: RawConfig, dtype: str) -> ModelSpec:
    """The encoder without a head."""
    return _read(raw, dtype, None)


def read_modernbert_classes(raw: RawConfig, dtype: str) -> ModelSpec:
    classes = read_classes(raw)
    kind = raw.read_choice(("cls", "mean"), "classifier_pooling", default="cls")
    if kind == "mean":
        classes = replace(classes, pooling="classify_mean")
    return _read(raw, dtype, classes)


def _read(raw: RawConfig, dtype: str, classes: ClassesSpec | None) -> ModelSpec:
    hidden, inner = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    num_layers, heads = read_num_layers(raw), read_heads(raw, hidden)
    common = read_common(raw, dtype, "modernbert", hidden, num_layers, heads)
    max_context = raw.read_size("max_position_embeddings", default=8192)
    kinds = _layer_types(raw, num_layers)
    traits = ModernBertTraits(
        attention_bias=raw.read(bool, "attention_bias", default=False),
        mlp_bias=raw.read(bool, "mlp_bias", default=False),
        norm_bias=raw.read(bool, "norm_bias", default=False),
        head_activation=raw.read_choice(ACTIVATIONS, "classifier_activation", default="gelu"),
        head_bias=raw.read(bool, "classifier_bias", default=False),
    )
    norm = hidden * (1 + traits.norm_bias)
    layer = 4 * hidden * hidden + 3 * hidden * inner + norm
    layer += 4 * hidden * traits.attention_bias + (2 * inner + hidden) * traits.mlp_bias
    head = norm
    if classes is not None:
        head += hidden * (hidden + traits.head_bias) + norm + len(classes.labels) * (hidden + 1)
    embedding = common["vocab_size"] * hidden + norm
    return ModelSpec(
        **common,
        intermediate_size=inner,
        activation=raw.read_choice(ACTIVATIONS, "hidden_activation", default="gelu"),
        norm_eps=raw.read(float, "norm_eps", default=1e-5),
        max_context=max_context,
        tie_word_embeddings=False,
        windows=_windows(raw, kinds),
        ropes=_ropes(raw, kinds, common["head_dim"], max_context),
        traits=traits,
        parameters=ParameterCounts(embedding, layer, head, (num_layers - 1) * norm),
        matrices=plain_block_matrices(hidden, inner, num_layers, gated=True),
        prompt_attention="bidirectional",
        is_encoder=True,
        classes=classes,
    )


def _layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    period = raw.read_size("global_attn_every_n_layers", default=3)
    default = tuple(SLIDING if layer % period else FULL for layer in range(num_layers))
    return read_layer_types(raw, num_layers, default)


def _windows(raw: RawConfig, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Per layer; half of `local_attention` lies before a token, and half behind it."""
    window = raw.read_size("local_attention", default=128) // 2 + 1
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(
    raw: RawConfig, kinds: tuple[str, ...], head_dim: int, max_context: int
) -> tuple[RopeSpec, ...]:
    thetas = {
        FULL: raw.read(float, "global_rope_theta", default=160_000.0),
        SLIDING: raw.read(float, "local_rope_theta", default=10_000.0),
    }
    ropes = {
        kind: read_ropes(raw, (kind,), head_dim, max_context, theta)[0]
        for kind, theta in thetas.items()
    }
    return tuple(ropes[kind] for kind in kinds)


FAMILIES = (
    Family(
        "ModernBERT",
        "quire.compute.models.modernbert:ModernBertModel",
        "modernbert",
        {
            "ModernBertModel": read_modernbert,
            "ModernBertForMaskedLM": read_modernbert,
            "ModernBertForSequenceClassification": read_modernbert_classes,
        },
    ),
)
