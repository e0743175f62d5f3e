"""Tensors of a GGUF file under the names that Hugging Face folders give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.config.gguf.header import GGUFEntry, GGUFHeader
from quire.errors import ConfigError

__all__ = [
    "ARCHITECTURES",
    "MIXTRAL",
    "GGUFArchitecture",
    "GGUFLayout",
    "find_architecture",
    "layout_of",
    "num_draft_blocks",
]

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
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
_PHI3_BLOCK = {**_BLOCK, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4_BLOCK = {
    **_BLOCK,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_OLMO2_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTER, _SHARED = "ffn_gate_inp", "ffn_gate_inp_shexp"
_GATE_UP, _GATE_AND_UP = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")
"""One tensor of gate and up of all experts, and the two that may stand in its place."""


def _with_experts(
    router: str, experts: str, parts: tuple[str, str, str], shared: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Names of a block with experts: the router, and gate, up and down of each expert by its
    number. shared: names of a network for all tokens."""
    gate, up, down = (f"{experts}.{{}}.{part}" for part in parts)
    own = {_ROUTER: router, "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {**_BLOCK, **own, **(shared or {})}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_QWEN_BLOCK = _with_experts("mlp.gate", "mlp.experts", _PROJECTIONS)
_QWEN2_BLOCK = _with_experts(
    "mlp.gate",
    "mlp.experts",
    _PROJECTIONS,
    {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        _SHARED: "mlp.shared_expert_gate",
    },
)
_MIXTRAL_BLOCK = _with_experts(
    "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")
)
_GRANITE_BLOCK = _with_experts(
    "block_sparse_moe.router.layer", "block_sparse_moe.experts", _PROJECTIONS
)
_GLM4_MOE_BLOCK = _with_experts(
    "mlp.gate",
    "mlp.experts",
    _PROJECTIONS,
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
)
_GEMMA4_BLOCK = {
    **_with_experts("router.proj", "experts", _PROJECTIONS),
    **_GEMMA_BLOCK,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GPT_OSS_BLOCK = _with_experts(
    "mlp.router",
    "mlp.experts",
    _PROJECTIONS,
    {"post_attention_norm": "post_attention_layernorm"},
)
_WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
}
"""Tensors of a block whose names have no ending in folders."""

_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>\w+)\.(?P<kind>weight|bias|scale)")
BUFFERS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings, not weights: `config_of` reads them."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """Differences between files of one architecture and Hugging Face folders.

    name: of the architecture in config.json. block: names of a block's tensors; one with a dot is
    whole, as those of `_WHOLE_NAMES`, but of this architecture alone. pairs_heads: rows
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
        "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", _PHI3_BLOCK),
        "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2", _OLMO2_BLOCK),
        "glm4": GGUFArchitecture("Glm4ForCausalLM", "glm4", _GLM4_BLOCK),
        "granite": GGUFArchitecture("GraniteForCausalLM", "granite", _BLOCK, pairs_heads=True),
        "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", _BLOCK, pairs_heads=True),
        "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", _QWEN2_BLOCK),
        "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN_BLOCK),
        "olmoe": GGUFArchitecture("OlmoeForCausalLM", "olmoe", _QWEN_BLOCK),
        "granitemoe": GGUFArchitecture(
            "GraniteMoeForCausalLM", "granitemoe", _GRANITE_BLOCK, pairs_heads=True
        ),
        "glm4moe": GGUFArchitecture("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE_BLOCK),
        "gpt-oss": GGUFArchitecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS_BLOCK),
        "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA_BLOCK, adds_one=True),
        "gemma4": GGUFArchitecture("Gemma4ForCausalLM", "gemma4_text", _GEMMA4_BLOCK),
    }
)
"""Architectures that can be read, keyed by `general.architecture`."""


MIXTRAL = GGUFArchitecture("MixtralForCausalLM", "mixtral", _MIXTRAL_BLOCK, pairs_heads=True)
"""Its files call themselves "llama", and state a number of experts."""


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
    if name == "llama" and header.integer("llama.expert_count"):
        return name, MIXTRAL
    return name, ARCHITECTURES[name]


def num_draft_blocks(header: GGUFHeader, name: str) -> int:
    """Blocks behind the last layer that guess further tokens."""
    return header.integer(f"{name}.nextn_predict_layers") or 0


def layout_of(header: GGUFHeader) -> dict[str, GGUFLayout]:
    """Every weight of the model by its Hugging Face name, those of experts one by one; a tensor
    that has none keeps its own. Blocks that guess further tokens are left out.

    Raises ConfigError for an unknown architecture, or heads that do not divide the rows."""
    name, architecture = find_architecture(header)
    heads: dict[str, int] = {}
    if architecture.pairs_heads:
        num_heads = header.integer(f"{name}.attention.head_count") or 0
        own = header.integer(f"{name}.attention.head_count_kv") or num_heads
        heads = {"attn_q": num_heads, "attn_k": own}
    found: dict[str, GGUFLayout] = {}
    drafts = num_draft_blocks(header, name)
    num_layers = (header.integer(f"{name}.block_count") or 0) - drafts
    for entry in header.tensors.values():
        layer = _LAYER.match(entry.name)
        is_draft = drafts > 0 and layer is not None and int(layer[1]) >= num_layers
        if entry.name in BUFFERS or is_draft:
            continue
        match = _TENSOR.fullmatch(entry.name)
        part = match["part"] if match else ""
        paired = heads.get(part, 0)
        if paired < 0 or (paired and entry.shape[0] % (2 * paired)):
            raise ConfigError(
                f"{header.file}: tensor {entry.name!r} has {entry.shape[0]} rows, which are no "
                f"whole number of pairs for {paired} heads"
            )
        adds_one = architecture.adds_one and part.endswith("norm")
        places = _hugging_face_names(match, architecture) or (entry.name,)
        for full, own in _one_by_one(places, entry):
            if full in found:
                raise ConfigError(
                    f"{header.file}: tensors {found[full].entry.name!r} and {entry.name!r} are "
                    "the same weight; fetch the file again"
                )
            found[full] = GGUFLayout(own, paired, adds_one)
    return found


def _one_by_one(places: tuple[str, ...], entry: GGUFEntry) -> Iterator[tuple[str, GGUFEntry]]:
    """Yield a tensor by its name, or the matrices of all experts that it holds by theirs. places:
    names of those of an expert, which share its rows equally."""
    place = places[0]
    if entry.name.endswith(f"{_SHARED}.weight") and len(entry.shape) == 1:
        entry = replace(entry, shape=(1, *entry.shape))  # a projection to one number
    if "{}" not in place or len(entry.shape) != (2 if place.endswith(".bias") else 3):
        yield place, entry
        return
    experts, rows, *rest = entry.shape
    if rows % len(places):
        yield entry.name, entry  # is refused under its own name
        return
    shape = (rows // len(places), *rest)
    size = (entry.end - entry.start) // (experts * len(places))
    for index in range(experts * len(places)):
        expert, part = divmod(index, len(places))
        start = entry.start + index * size
        own = replace(entry, shape=shape, start=start, end=start + size)
        yield places[part].format(expert), own


def _hugging_face_names(
    match: re.Match[str] | None, architecture: GGUFArchitecture
) -> tuple[str, ...]:
    """Return the name of a tensor, or those of an expert's parts that it holds; () for none."""
    if match is None:
        return ()
    names, prefix = _OUTER, ""
    if match["layer"] is not None:
        names, prefix = architecture.block, f"model.layers.{int(match['layer'])}."
        full = f"{match['part']}.{match['kind']}"
        whole = _WHOLE_NAMES.get(full) or names.get(full)
        if whole is not None:
            return (prefix + whole,)
    parts = _GATE_AND_UP if match["part"] == _GATE_UP else (match["part"],)
    if match["kind"] == "scale" or any(part not in names for part in parts):
        return ()
    return tuple(f"{prefix}{names[part]}.{match['kind']}" for part in parts)
