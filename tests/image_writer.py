"""Tiny random checkpoints for text and images, written by `transformers`, and images for them."""

from __future__ import annotations

import io
import json
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
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = model_of(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(mean=1.0, std=0.1)
            else:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
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
