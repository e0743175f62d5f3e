"""Metadata of a GGUF file as the config.json that the model would have in a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from quire.base.errors import ConfigError
from quire.config.families.gguf_names import GGUFNames
from quire.config.families.qwen3_next import DELTA, DELTA_LAYOUT
from quire.config.families.shared import FULL
from quire.config.gguf.checkpoint import find_architecture, num_draft_blocks
from quire.config.gguf.deepseek import deepseek_experts, has_latent, latent_settings
from quire.config.gguf.header import GGUFHeader, float32
from quire.config.gguf.ropes import (
    axes_of,
    not_served,
    refuse_unread_ropes,
    rope_divisors,
    scaling_beside,
    scaling_of,
)
from quire.config.hf import RawConfig

__all__ = ["config_of", "dtype_of", "end_token_ids", "ends_by_text"]

_DTYPES = {"F32": "float32", "F16": "float16"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset((
    "<end_of_turn>", "<turn|>", "<|tool_response>",  # Gemma
    "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>",
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3
    "<EOT>", "<end_of_utterance>",
))  # fmt: skip
"""Tokens that end a turn in every model that has them, as llama.cpp takes them: files often state
one end alone."""

_MESSAGE_END, _ANSWER_ENDS = "<|end|>", ("<|return|>", "<|call|>")
"""gpt-oss has all three. There the first ends a message, after which the answer goes on."""

_GPT_OSS_RAMP = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
"""YaRN of gpt-oss as far as files do not say it."""

_STILL = 1e9
"""Divisors at and above it leave pairs of a head as they are."""

_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62
"""Layers of the one size whose factor on q·k comes from hidden size over heads."""


def config_of(header: GGUFHeader) -> RawConfig:
    """config.json in the spelling of transformers. Its reader checks the values.

    Raises ConfigError: an unknown architecture, or a value of the wrong type.
    """
    names, family = find_architecture(header)
    name = names.name
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(
            f"{header.file}: has no table token_embd.weight; fetch the file again, or take one "
            "that holds a language model"
        )
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": header.value(f"{name}.embedding_length"),
        "num_hidden_layers": header.value(f"{name}.block_count"),
        "num_attention_heads": header.value(f"{name}.attention.head_count"),
        "rms_norm_eps": float32(header.value(f"{name}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": header.value(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "is_causal": header.flag(f"{name}.attention.causal"),
        "attention_bias": family.model_type != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(end_token_ids(header)),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
    }
    _refuse_more_blocks_than_tensors(header, values["num_hidden_layers"])
    if not has_latent(header, name):
        _refuse_value_length(header, name)
    if not names.partly_rotated:
        _refuse_rotated_parts(header, name)
    refuse_unread_ropes(header, names, _head_dim(header, name))
    window = header.value(f"{name}.attention.sliding_window") or None  # files of Phi-4 have 0
    raw = RawConfig(values, str(header.file))
    theta = float32(header.value(f"{name}.rope.freq_base"))
    if name == "gemma4":
        values["sliding_window"] = window
        values |= _gemma4(header, values, theta)
        return raw
    kv_heads = _kv_heads(header, names)
    values |= {
        "intermediate_size": header.value(f"{name}.feed_forward_length"),
        "num_key_value_heads": values["num_attention_heads"] if kv_heads is None else kv_heads,
        "head_dim": _head_dim(header, name),
    }
    rotary_dim = header.integer(f"{name}.rope.dimension_count") or values["head_dim"]
    scaling = axes_of(header, name, scaling_of(header, name, raw, rotary_dim))
    if name == "gemma3":
        values |= _gemma3(header, values, theta, scaling)
        values["sliding_window"] = window
    else:
        values["rope_theta"] = theta
        values["rope_scaling"] = scaling
        values |= _of_family(header, names, values, window)
    return raw


def dtype_of(header: GGUFHeader) -> str:
    """The dtype to compute in: the one of most weights if they are plain, else bfloat16."""
    counts: dict[str, int] = {}
    for entry in header.tensors.values():
        kind = entry.kind.name
        counts[kind] = counts.get(kind, 0) + math.prod(entry.shape)
    most = max(counts, key=lambda kind: counts[kind], default="BF16")
    return _DTYPES.get(most, "bfloat16")


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Tokens that end a text, a turn or a message, each once: the stated ones, and those that are
    known by their text."""
    stated = (header.integer(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    known = ends_by_text(header.array("tokenizer.ggml.tokens") or ())
    return tuple(dict.fromkeys((*(token for token in stated if token is not None), *known)))


def ends_by_text(tokens: Sequence[Any]) -> tuple[int, ...]:
    """Ids of the tokens that end a turn by their text, of the texts by id."""
    found = [(index, token) for index, token in enumerate(tokens) if token in _END_TEXTS]
    texts = {token for _, token in found}
    if texts >= {*_ANSWER_ENDS}:
        texts.discard(_MESSAGE_END)
    return tuple(index for index, token in found if token in texts)


def _kv_heads(header: GGUFHeader, names: GGUFNames) -> Any:
    """Number of kv heads of the layers that attend."""
    key = f"{names.name}.attention.head_count_kv"
    if names.rest_type is None or key not in header.arrays:
        return header.value(key)
    counts = {count for count in header.array(key) or () if count}
    if len(counts) > 1:
        raise ConfigError(
            f"{header.file}: {key} differs from layer to layer, which quire does not serve"
        )
    return next(iter(counts), None)


def _refuse_value_length(header: GGUFHeader, name: str) -> None:
    for end in ("length", "length_swa"):
        key, value = (header.integer(f"{name}.attention.{part}_{end}") for part in ("key", "value"))
        if value is not None and key is not None and key != value:
            raise ConfigError(
                f"{header.file}: {name}.attention.key_{end}={key} and value_{end}={value} differ, "
                "which quire does not serve"
            )


def _refuse_more_blocks_than_tensors(header: GGUFHeader, num_blocks: Any) -> None:
    """A number of a few bytes must not describe a model that fills any memory."""
    if isinstance(num_blocks, int) and num_blocks > len(header.tensors):
        raise ConfigError(
            f"{header.file}: states {num_blocks} blocks and has {len(header.tensors)} tensors; "
            "fetch the file again"
        )


def _refuse_rotated_parts(header: GGUFHeader, name: str) -> None:
    rotated = header.integer(f"{name}.rope.dimension_count")
    head_dim = _head_dim(header, name)
    if rotated is not None and isinstance(head_dim, int) and rotated != head_dim:
        raise ConfigError(
            f"{header.file}: {name}.rope.dimension_count={rotated} rotates a part of heads of "
            f"{head_dim}, which quire does not serve; take the model's Hugging Face folder"
        )


def _head_dim(header: GGUFHeader, name: str) -> Any:
    """Size of a head; where it is not stated, as in files of Phi-3, heads share the hidden size.
    None if they cannot, which the reader of the config tells."""
    stated = header.value(f"{name}.attention.key_length")
    heads = header.value(f"{name}.attention.head_count")
    hidden = header.value(f"{name}.embedding_length")
    if stated is not None or not (isinstance(hidden, int) and isinstance(heads, int)):
        return stated
    return hidden // heads if heads > 0 and hidden % heads == 0 else None


def _of_family(
    header: GGUFHeader, names: GGUFNames, values: dict[str, Any], window: Any
) -> dict[str, Any]:
    """Settings that files of one architecture alone have."""
    name = names.name

    def read(key: str) -> Any:
        return float32(header.value(f"{name}.{key}"))

    found = {key: read(stored) for key, stored in names.numbers.items()}
    found |= names.constants
    found |= _experts(header, name)
    heads = header.array(f"{name}.attention.head_count_kv")
    if names.rest_type is not None and heads is not None:
        found["layer_types"] = [FULL if count else names.rest_type for count in heads]
    match name:
        case "qwen35" | "qwen35moe" | "qwen3next":
            return found | _gated_delta(header, name, values)
        case "glm4moe":
            return found | _glm4_moe(header, name, read, values)
        case "deepseek2" | "minicpm3":
            return found | latent_settings(header, name, read, values["rope_scaling"])
        case "gpt-oss":
            ramp, scaling = _GPT_OSS_RAMP, values["rope_scaling"]
            return found | {
                "intermediate_size": header.value(f"{name}.expert_feed_forward_length")
                or values["intermediate_size"],
                "sliding_window": window,
                "rope_scaling": None if scaling is None else {**ramp, **scaling},
            }
        case _ if names.partly_rotated:
            original = header.value(f"{name}.rope.scaling.original_context_length")
            return found | {
                "sliding_window": window,
                "partial_rotary_factor": _rotated_share(header, name, values),
                "original_max_position_embeddings": original,
            }
        case "olmo2" if window:
            return found | {"sliding_window": window}
        case _:
            return found


def _rotated_share(header: GGUFHeader, name: str, values: dict[str, Any]) -> float | None:
    size, head_dim = header.integer(f"{name}.rope.dimension_count"), values["head_dim"]
    if not head_dim:
        return None
    return 1.0 if size is None else size / head_dim


def _glm4_moe(
    header: GGUFHeader, name: str, read: Callable[[str], Any], values: dict[str, Any]
) -> dict[str, Any]:
    """The rotated part of heads, norms, and the router's settings."""
    share = _rotated_share(header, name, values)
    return {
        **({} if share is None else {"partial_rotary_factor": share}),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        **deepseek_experts(header, name, read),
    }


def _gated_delta(header: GGUFHeader, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Heads of the rule, and their layout: files of Qwen3-Next have b and a by key head, those of
    Qwen3.5 values of all keys in turn. Layers have the rule where its rates are; blocks that guess
    further tokens count no layers."""
    drafts = num_draft_blocks(header, name)
    found: dict[str, Any] = {
        "partial_rotary_factor": _rotated_share(header, name, values),
        "norm_topk_prob": True,
        DELTA_LAYOUT: "gates_by_key" if name == "qwen3next" else "in_turn",
    }
    size, heads = (header.integer(f"{name}.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if size and heads:
        found["linear_value_head_dim"] = size // heads
    num_layers = values["num_hidden_layers"]
    if isinstance(num_layers, int):
        num_layers -= drafts
        rates = [f"blk.{layer}.ssm_a" in header.tensors for layer in range(num_layers)]
        found["layer_types"] = [DELTA if has_rule else FULL for has_rule in rates]
        found["num_hidden_layers"] = num_layers
    return {key: value for key, value in found.items() if value is not None}


def _experts(header: GGUFHeader, name: str) -> dict[str, Any]:
    """Return the number and the size of experts, if there are any. Whether weights are normed is
    not stored: each architecture does as its published models do."""
    count = header.integer(f"{name}.expert_count")
    if not count:
        return {}
    found = {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": header.integer(f"{name}.expert_used_count"),
        "clip_qkv": float32(header.value(f"{name}.attention.clamp_kqv")) or None,
        "norm_topk_prob": name in ("qwen3moe", "lfm2moe"),
        "moe_intermediate_size": header.value(f"{name}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.value(
            f"{name}.expert_shared_feed_forward_length"
        ),
    }
    return {key: value for key, value in found.items() if value is not None}


def _gemma3(
    header: GGUFHeader, values: dict[str, Any], theta: Any, scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """Sliding layers have a base of their own and no scaling; the factor on q·k is not stored."""
    hidden, heads, head_dim = (
        values[key] for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    is_27b = values["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    factor = hidden // heads if is_27b and hidden and heads else head_dim
    pattern = header.metadata.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": factor,
        "sliding_window_pattern": pattern,
        "rope_theta": theta,
        "rope_local_base_freq": float32(header.metadata.get("gemma3.rope.freq_base_swa")),
        "rope_scaling": scaling,
        "final_logit_softcapping": header.metadata.get("gemma3.final_logit_softcapping"),
    }


def _gemma4(header: GGUFHeader, values: dict[str, Any], theta: Any) -> dict[str, Any]:
    """Sliding layers have heads, a base and a number of kv heads of their own; the last layers may
    have wider networks."""
    num_layers = values["num_hidden_layers"]
    if not isinstance(num_layers, int) or num_layers < 1:
        return {}  # as its reader says
    slides = _by_layer(header, "gemma4.attention.sliding_window_pattern", num_layers)
    kv_heads = _by_layer(header, "gemma4.attention.head_count_kv", num_layers)
    if slides[-1]:
        raise ConfigError(f"{header.file}: the last layer slides, which quire does not serve")
    if (scaling := scaling_beside(header, "gemma4")) is not None:
        raise not_served(header, *scaling, "scales positions")
    full, sliding = (header.integer(f"gemma4.attention.key_length{end}") for end in ("", "_swa"))
    shapes = {
        str(layer): {
            "head_dim": sliding if slides[layer] else full,
            "num_key_value_heads": kv_heads[layer],
        }
        for layer in range(num_layers)
    }
    first = slides.index(False) if False in slides else num_layers - 1
    table = header.tensors.get("per_layer_token_embd.weight")
    shared = header.integer("gemma4.attention.shared_kv_layers") or 0
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "head_dim": sliding,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": shapes,
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": header.integer("gemma4.embedding_length_per_layer_input")
        or 0,
        "vocab_size_per_layer_input": values["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": float32(header.metadata.get("gemma4.final_logit_softcapping")),
        "rope_parameters": _gemma4_ropes(header, theta, full, sliding),
        **_gemma4_sizes(header, num_layers, shared),
    }


def _by_layer(header: GGUFHeader, key: str, num_layers: int) -> list[Any]:
    """Return a value for each layer, of an array or of a single value."""
    if key not in header.arrays and key not in header.metadata:
        raise ConfigError(f"{header.file}: its metadata lack {key}; convert the model again")
    found = header.array(key) if key in header.arrays else [header.metadata[key]] * num_layers
    if found is None or len(found) != num_layers:
        raise ConfigError(
            f"{header.file}: {key} has {len(found or ())} entries for {num_layers} layers"
        )
    return found


def _gemma4_sizes(header: GGUFHeader, num_layers: int, shared: int) -> dict[str, Any]:
    """Sizes of networks. Layers that read K and V of others may have them twice as wide."""
    key = "gemma4.feed_forward_length"
    sizes = _by_layer(header, key, num_layers)
    size, last = sizes[0], sizes[-1]
    doubled = 0 < shared < num_layers and isinstance(size, int) and last == 2 * size
    wide = shared if doubled else 0
    if sizes != [size] * (num_layers - wide) + [last] * wide:
        raise ConfigError(
            f"{header.file}: {key} differs from layer to layer in a way that quire does not serve"
        )
    count = header.integer("gemma4.expert_count") or 0
    return {
        "intermediate_size": size,
        "use_double_wide_mlp": doubled,
        "enable_moe_block": count > 0,
        "num_experts": count or None,
        "top_k_experts": header.integer("gemma4.expert_used_count"),
        "moe_intermediate_size": header.integer("gemma4.expert_feed_forward_length"),
    }


def _gemma4_ropes(
    header: GGUFHeader, theta: Any, full: int | None, sliding: int | None
) -> dict[str, Any]:
    """Heads of sliding layers turn whole; those of full ones as far as divisors are 1, the others
    being so large that nothing turns."""
    rotated = header.integer("gemma4.rope.dimension_count_swa")
    if rotated is not None and rotated != sliding:
        raise ConfigError(
            f"{header.file}: gemma4.rope.dimension_count_swa={rotated} rotates a part of heads of "
            f"{sliding}, which quire does not serve; take the model's Hugging Face folder"
        )
    divisors = rope_divisors(header, "rope_freqs.weight")
    share = 1.0
    if divisors is not None:
        turned = divisors.count(1.0)
        if (
            2 * len(divisors) != full
            or any(each != 1.0 for each in divisors[:turned])
            or any(each < _STILL for each in divisors[turned:])
        ):
            raise ConfigError(
                f"{header.file}: rope_freqs.weight does not say which of the {full} numbers of a "
                "head turn; fetch the file again"
            )
        share = turned / len(divisors)
    swa = float32(header.metadata.get("gemma4.rope.freq_base_swa"))
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": 1e6 if theta is None else theta,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4 if swa is None else swa},
    }
