"""Tensors of a GGUF file under the names that Hugging Face folders give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.config.gguf.header import GGUFEntry, GGUFHeader
from quire.errors import ConfigError

__all__ = ["ARCHITECTURES", "GGUFArchitecture", "GGUFLayout", "find_architecture", "layout_of"]

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
BUFFERS = ("rope_freqs.weight",)
"""Tensors that are settings, not weights: `config_of` reads them."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """Differences between files of one architecture and Hugging Face folders.

    name: of the architecture in config.json. block: names of a block's tensors. pairs_heads: rows
    of q and k are in the order of the rotated pairs. adds_one: norms hold the 1 that is added to
    them.
    """

    name: str
    model_type: str
    block: Mapping[str, str]
    pairs_heads: bool = False
    adds_one: bool = False


ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "llama": GGUFArchitecture("LlamaForCausalLM", "llama", _BLOCK, pairs_heads=True),
        "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", _BLOCK),
        "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", _BLOCK),
        "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA_BLOCK, adds_one=True),
    }
)
"""Architectures that can be read, keyed by `general.architecture`."""


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Mapping of a tensor's rows on disk to those of its Hugging Face counterpart.

    entry: where and what it is. paired_heads: number of heads whose rows are in the order of the
    rotated pairs (first element of each half, then second, ...); 0 leaves rows as they are.
    adds_one: each number is larger by 1 than in the Hugging Face tensor.
    """

    entry: GGUFEntry
    paired_heads: int = 0
    adds_one: bool = False


def find_architecture(header: GGUFHeader) -> tuple[str, GGUFArchitecture]:
    """general.architecture and what is known of it. Raises ConfigError for one that is not."""
    name = header.string("general.architecture")
    if name is None or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        stated = "is missing" if name is None else f"{name[:80]!r} is not supported"
        raise ConfigError(
            f"{header.file}: general.architecture {stated}; quire reads GGUF files of {known}"
        )
    return name, ARCHITECTURES[name]


def layout_of(header: GGUFHeader) -> dict[str, GGUFLayout]:
    """Every weight of the model by its Hugging Face name; a tensor that has none keeps its own.

    Raises ConfigError for an unknown architecture, or heads that do not divide the rows."""
    name, architecture = find_architecture(header)
    num_heads = header.integer(f"{name}.attention.head_count") or 0
    heads = {
        "attn_q": num_heads,
        "attn_k": header.integer(f"{name}.attention.head_count_kv") or num_heads,
    }
    found: dict[str, GGUFLayout] = {}
    for entry in header.tensors.values():
        if entry.name in BUFFERS:
            continue
        match = _TENSOR.fullmatch(entry.name)
        part = match["part"] if match else ""
        paired = heads.get(part, 0) if architecture.pairs_heads else 0
        if paired < 0 or (paired and entry.shape[0] % (2 * paired)):
            raise ConfigError(
                f"{header.file}: tensor {entry.name!r} has {entry.shape[0]} rows, which are no "
                f"whole number of pairs for {paired} heads"
            )
        adds_one = architecture.adds_one and part.endswith("norm")
        place = _hugging_face_name(match, architecture) or entry.name
        if place in found:
            raise ConfigError(
                f"{header.file}: tensors {found[place].entry.name!r} and {entry.name!r} are the "
                "same weight; fetch the file again"
            )
        found[place] = GGUFLayout(entry, paired, adds_one)
    return found


def _hugging_face_name(match: re.Match[str] | None, architecture: GGUFArchitecture) -> str | None:
    if match is None:
        return None
    names, prefix = _OUTER, ""
    if match["layer"] is not None:
        names, prefix = architecture.block, f"model.layers.{int(match['layer'])}."
    place = names.get(match["part"])
    return None if place is None else f"{prefix}{place}.{match['kind']}"
