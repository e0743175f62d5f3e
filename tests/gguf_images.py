"""Checkpoints for text and images as two GGUF files: the language model, and the encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.gguf_tokenizer import tokenizer_metadata
from tests.gguf_writer import Tensor, float_tensor, gguf_metadata, gguf_rows, write_gguf

LANGUAGE_MODELS = {
    "smolvlm": "llama",
    "idefics3": "llama",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_5": "qwen35",
    "gemma3": "gemma3",
}
"""`general.architecture` by the `model_type` of a folder."""

_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_VISION = re.compile(
    r"(?:model\.)?(visual|vision_model|vision_tower|connector|multi_modal_projector)\."
)
_SIGLIP = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_QWEN = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "pos_embed": "v.position_embd",
    "merger.ln_q": "v.post_ln",
    "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}
_DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def write_two_files(folder: Path, out: Path, kind: str = "F32", **more: Any) -> tuple[Path, Path]:
    """Write the checkpoint of `folder` as `out`/model.gguf and `out`/mmproj-model.gguf. kind: type
    of the encoder's matrices. more: metadata of the encoder, by the key behind "clip."."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    text = {_text_name(name): tensor for name, tensor in weights.items() if not _VISION.match(name)}
    own = config.text_config
    architecture = LANGUAGE_MODELS[config.model_type]
    rows = gguf_rows(text, architecture, own)
    metadata = {
        **gguf_metadata(architecture, own),
        **_positions(architecture, own),
        **tokenizer_metadata(folder),
        "tokenizer.ggml.add_bos_token": True,
    }
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: float_tensor(values) for name, values in rows.items()}
    model = write_gguf(out / "model.gguf", metadata, tensors)
    names, values = _encoder(config, weights)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    stated = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": own.hidden_size,
        **_sizes(config.vision_config),
        "clip.vision.image_mean": processor["image_mean"],
        "clip.vision.image_std": processor["image_std"],
        **_stated(config, processor),
        **{f"clip.{key}": value for key, value in more.items()},
    }
    stored = {name: _stored(tensor, kind) for name, tensor in zip(names, values, strict=True)}
    return model, write_gguf(out / "mmproj-model.gguf", stated, stored)


def _text_name(name: str) -> str:
    """Name in a model of text alone."""
    plain = _TEXT.sub("", name).removeprefix("model.")
    return plain if plain.startswith("lm_head") else f"model.{plain}"


def _stored(values: torch.Tensor, kind: str) -> Tensor:
    """Vectors are always in float32."""
    if kind == "F32" or values.dim() == 1:
        return float_tensor(values)
    return Tensor("F16", tuple(values.shape), values.half().contiguous().numpy().tobytes())


def _positions(architecture: str, config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    if architecture == "gemma3":
        return {
            "gemma3.rope.freq_base": float(rope["full_attention"]["rope_theta"]),
            "gemma3.rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
            "gemma3.attention.sliding_window_pattern": 3,
        }
    found: dict[str, Any] = {f"{architecture}.rope.freq_base": float(rope["rope_theta"])}
    if "mrope_section" in rope:
        found[f"{architecture}.rope.dimension_sections"] = [*rope["mrope_section"], 0]
    return found


def _sizes(vision: Any) -> dict[str, Any]:
    of_qwen = hasattr(vision, "depth")
    values = {
        "image_size": 28 if of_qwen else vision.image_size,
        "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.depth if of_qwen else vision.num_hidden_layers,
        "attention.head_count": vision.num_heads if of_qwen else vision.num_attention_heads,
        "attention.layer_norm_epsilon": 1e-6,
    }
    return {f"clip.vision.{key}": value for key, value in values.items()}


def _stated(config: Any, processor: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.vision_config
    match config.model_type:
        case "smolvlm" | "idefics3":
            return {
                "clip.projector_type": "idefics3",
                "clip.use_gelu": True,
                "clip.vision.projector.scale_factor": config.scale_factor,
                "clip.vision.preproc_image_size": processor["size"]["longest_edge"],
            }
        case "gemma3":
            patches = vision.image_size // vision.patch_size
            pool = patches // round(config.mm_tokens_per_image**0.5)
            return {
                "clip.projector_type": "gemma3",
                "clip.use_gelu": True,
                "clip.vision.projector.scale_factor": pool,
            }
    bounds = {
        "clip.vision.image_min_pixels": processor["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": processor["size"]["longest_edge"],
        "clip.vision.spatial_merge_size": vision.spatial_merge_size,
    }
    if config.model_type == "qwen2_5_vl":
        return bounds | {
            "clip.projector_type": "qwen2.5vl_merger",
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": vision.fullatt_block_indexes[0] + 1,
            "clip.vision.window_size": vision.window_size,
        }
    deep = getattr(vision, "deepstack_visual_indexes", [])
    return bounds | {
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        "clip.vision.is_deepstack_layers": [layer in deep for layer in range(vision.depth)],
    }


def _encoder(
    config: Any, weights: Mapping[str, torch.Tensor]
) -> tuple[list[str], list[torch.Tensor]]:
    """Tensors of the encoder, and their names in GGUF."""
    names: list[str] = []
    values: list[torch.Tensor] = []
    for name, tensor in weights.items():
        plain = name.removeprefix("model.")
        if not _VISION.match(name):
            continue
        for own, part in _renamed(plain, tensor, config):
            names.append(own)
            values.append(part)
    return names, values


def _renamed(name: str, tensor: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    stem, _, kind = name.rpartition(".")
    if name == "multi_modal_projector.mm_input_projection_weight":
        return [("mm.input_projection.weight", tensor)]
    if stem == "multi_modal_projector.mm_soft_emb_norm":
        return [("mm.soft_emb_norm.weight", tensor + 1)]
    if stem == "connector.modality_projection.proj":
        return [("mm.model.fc.weight", tensor)]
    if stem == "visual.patch_embed.proj":
        if kind == "bias":
            return [("v.patch_embd.bias", tensor)]
        return [
            ("v.patch_embd.weight", tensor[:, :, 0]),
            ("v.patch_embd.weight.1", tensor[:, :, 1]),
        ]
    deep = re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(\w+)", stem)
    if deep is not None:
        layer = config.vision_config.deepstack_visual_indexes[int(deep[1])]
        return [(f"v.deepstack.{layer}.{_DEEP[deep[2]]}.{kind}", tensor)]
    if stem.endswith("attn.qkv") and config.model_type == "qwen2_5_vl":
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return [
            found
            for letter, part in parts
            for found in _renamed(name.replace("qkv", letter), part, config)
        ]
    inner = re.sub(r"^(visual|vision_model|vision_tower(\.vision_model)?)\.", "", stem)
    block = re.match(r"(?:encoder\.layers|blocks)\.(\d+)\.(.*)", inner)
    known = {**_SIGLIP, **_QWEN}
    if block is None:
        return [(f"{known[inner]}.{kind}", tensor)]
    return [(f"v.blk.{block[1]}.{known[block[2]]}.{kind}", tensor)]
