"""The Cohere lineage: Command R, R+ without norms on heads, and R7B (Cohere 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.families.family import Family
from quire.config.families.llama import read_llama_like
from quire.config.families.shared import FULL, SLIDING, read_layer_types, read_num_layers
from quire.config.hf import RawConfig
from quire.config.model_spec import LlamaTraits, ModelSpec

__all__ = ["CohereTraits", "FAMILIES"]

_COHERE = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 255001,
}


@dataclass(frozen=True, slots=True)
class CohereTraits:
    """Command R: biases around attention, and the factor on logits."""

    bias: bool
    logit_factor: float


def read_cohere(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("use_qk_norm", True, "quire has no layer norms on heads")
    raw = raw.with_defaults({**_COHERE, "rope_theta": 5e5})
    return _read(raw, dtype, (FULL,) * read_num_layers(raw))


def read_cohere2(raw: RawConfig, dtype: str) -> ModelSpec:
    """Three layers in four slide, if the file is silent; the others see no positions."""
    raw = raw.with_defaults({**_COHERE, "sliding_window": 4096})
    num_layers = read_num_layers(raw)
    pattern = raw.read_size("sliding_window_pattern", default=4)
    by_pattern = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, by_pattern)
    spec = _read(raw, dtype, layer_types)
    ropes = zip(spec.ropes, layer_types, strict=True)
    return replace(spec, ropes=tuple(rope if kind == SLIDING else None for rope, kind in ropes))


def _read(raw: RawConfig, dtype: str, layer_types: tuple[str, ...]) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", default=False)
    as_llama = LlamaTraits(qkv_bias=bias, o_bias=bias)
    spec = read_llama_like(raw, dtype, as_llama, layer_types, tied=True)
    counts = spec.parameters
    return replace(
        spec,
        norm_eps=raw.read(float, "layer_norm_eps"),
        traits=CohereTraits(bias, raw.read(float, "logit_scale", default=0.0625)),
        parameters=replace(counts, layer=counts.layer - spec.hidden_size),
    )


_MODEL = "quire.compute.models.parallel:CohereModel"

FAMILIES = (
    Family("Command R", _MODEL, "cohere", {"CohereForCausalLM": read_cohere}),
    Family("Command R7B", _MODEL, "cohere2", {"Cohere2ForCausalLM": read_cohere2}),
)
