"""Tiny random checkpoints for text and images, written by `transformers`, and images for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image

from quire.bundled import bundled_model_path

TILE, PATCH, SCALE, LONGEST = 28, 7, 2, 84
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
IMAGE, EDGE = "<image>", "<fake_token_around_image>"
SPECIAL = (
    IMAGE,
    EDGE,
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": TILE},
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": LONGEST},
}


def write_vision_checkpoint(folder: Path, kind: str = "smolvlm", **text: Any) -> Path:
    """Write a SmolVLM or an Idefics 3. text: further values of the language model."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
    )

    tokenizer = tokenizers.Tokenizer.from_file(str(bundled_model_path() / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    config_of, model_of = {
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    }[kind]
    config = config_of(
        text_config={
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **text,
        },
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "image_size": TILE,
        },
        image_token_id=tokenizer.token_to_id(IMAGE),
        scale_factor=SCALE,
        tie_word_embeddings=False,
    )
    model = _drawn(model_of, config)
    return _write(folder, model, tokenizer, PROCESSOR, TEMPLATE)


QWEN_PAD, QWEN_START, QWEN_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
QWEN_IMAGE = f"{QWEN_START}{QWEN_PAD}{QWEN_END}"
QWEN_PATCH, QWEN_MERGE = 4, 2
QWEN_SPECIAL = (QWEN_PAD, QWEN_START, QWEN_END, "<|video_pad|>", "<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "merge_size": QWEN_MERGE,
    "patch_size": QWEN_PATCH,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 4 * 64, "longest_edge": 40 * 64},
    "temporal_patch_size": 2,
}
"""4 to 40 tokens of 8 x 8 pixels."""


def write_qwen_checkpoint(
    folder: Path,
    kind: str,
    *,
    patch: int = QWEN_PATCH,
    processor: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """Write a tiny Qwen2.5-VL, Qwen3-VL or Qwen3.5 (with experts too), by `model_type`. patch:
    pixels of the side of a patch. processor, text: more values of its processor, and of the
    language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tokenizers.Tokenizer.from_file(str(bundled_model_path() / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in QWEN_SPECIAL]
    )
    rope = {"rope_type": "default", "rope_theta": 100.0}
    base = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": QWEN_MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
    }
    if kind == "qwen2_5_vl":
        base |= {"rope_parameters": {**rope, "mrope_section": [1, 2, 1]}}
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    elif kind == "qwen3_vl":
        base |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_section": [4, 2, 2]}}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    else:
        base |= {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                **rope,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        }
        vision |= {"num_position_embeddings": 16}
        if kind == "qwen3_5_moe":
            base |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
            base |= {"num_experts": 4, "num_experts_per_tok": 2}
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    ids = {name: tokenizer.token_to_id(QWEN_SPECIAL[i]) for i, name in enumerate(names)}
    config = AutoConfig.for_model(
        kind, text_config={**base, **text}, vision_config=vision, tie_word_embeddings=False, **ids
    )
    model = _drawn(AutoModelForImageTextToText.from_config, config)
    own = {**QWEN_PROCESSOR, "patch_size": patch, **(processor or {})}
    return _write(folder, model, tokenizer, own, QWEN_TEMPLATE)


GEMMA_BEGIN, GEMMA_SOFT, GEMMA_END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
GEMMA_SIDE, GEMMA_TOKENS = 32, 16
GEMMA_SPECIAL = (GEMMA_BEGIN, GEMMA_SOFT, GEMMA_END, "<start_of_turn>", "<end_of_turn>")
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + message['role'] | replace('assistant', 'model') + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": GEMMA_TOKENS,
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": GEMMA_SIDE, "width": GEMMA_SIDE},
}


def write_gemma_checkpoint(
    folder: Path, *, processor: dict[str, Any] | None = None, **text: Any
) -> Path:
    """Write a tiny Gemma 3 with a window shorter than an image. processor, text: more values of
    its processor, and of the language model. Its tokenizer joins line ends, whatever text is beside
    them, as Gemma's does."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = tokenizers.Tokenizer.from_file(str(bundled_model_path() / "tokenizer.json"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in GEMMA_SPECIAL]
    )
    base = {
        "model_type": "gemma3_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 2048,
        "sliding_window": 12,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": GEMMA_SIDE,
        "vision_use_head": False,
    }
    names = ("boi_token_index", "image_token_index", "eoi_token_index")
    ids = {name: tokenizer.token_to_id(GEMMA_SPECIAL[i]) for i, name in enumerate(names)}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**base, **text},
        vision_config=vision,
        mm_tokens_per_image=GEMMA_TOKENS,
        **ids,
    )
    model = _drawn(AutoModelForImageTextToText.from_config, config)
    own = {**GEMMA_PROCESSOR, **(processor or {})}
    return _write(folder, model, tokenizer, own, GEMMA_TEMPLATE)


MARKS = {
    "smolvlm": IMAGE,
    "idefics3": IMAGE,
    "qwen2_5_vl": QWEN_IMAGE,
    "qwen3_vl": QWEN_IMAGE,
    "qwen3_5": QWEN_IMAGE,
    "gemma3": GEMMA_BEGIN,
}
"""Text of an image in a prompt, by the `model_type` of a family."""


def write_any_checkpoint(folder: Path, kind: str) -> Path:
    """Write a tiny checkpoint of any family, by its `model_type`."""
    if kind == "gemma3":
        return write_gemma_checkpoint(folder)
    if kind in ("smolvlm", "idefics3"):
        return write_vision_checkpoint(folder, kind)
    return write_qwen_checkpoint(folder, kind)


def _drawn(make: Callable[[Any], Any], config: Any) -> Any:
    """Make a model with numbers that are large enough for its answers to depend on its input."""
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = make(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(mean=1.0, std=0.1)
            else:
                parameter.normal_(std=0.1)
    return model


def _write(
    folder: Path, model: Any, tokenizer: Any, processor: dict[str, Any], template: str
) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of random colours."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(as_bytes(image)).decode()
