"""Tiny random encoders, written by `transformers`, with a tokenizer that every text has ids in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["KINDS", "TEXTS", "write_encoder", "write_sentence_files"]

WORDS = (
    "the", "a", "king", "queen", "old", "sea", "ship", "bread", "of", "and", "was", "in", "to",
    "house", "small", "river", "stone", "light", "winter", "bird", "song", "long", "road", "moon",
)  # fmt: skip
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
TEXTS = [
    "the old king and the sea",
    "bread",
    "a small house in the winter was long and the bird of stone light and song to the moon",
    "the queen of the river",
    "ship",
    "a long road to the sea and the old stone house in the winter of the small king",
]
KINDS = ("bert", "roberta", "xlm-roberta", "modernbert")

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def write_encoder(kind: str, folder: Path, *, num_labels: int = 0, **extra: Any) -> Any:
    """Save a random model, and its tokenizer, into `folder`; the `transformers` model. num_labels:
    0 for one without a head."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    given = {**_BASE, "num_labels": num_labels} if num_labels else _BASE
    own: dict[str, Any] = {"type_vocab_size": 2 if kind == "bert" else 1}
    if kind == "modernbert":
        own = {"num_hidden_layers": 4, "local_attention": 8}
    config = CONFIG_MAPPING[kind](**{**given, **own, **extra})
    config._attn_implementation = "eager"
    make = AutoModelForSequenceClassification if num_labels else AutoModel
    model = make.from_config(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(noise + 1.0 if is_norm else noise)
    model.save_pretrained(folder)
    _write_tokenizer(kind, folder)
    return model


def _write_tokenizer(kind: str, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    if kind == "bert":
        tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    else:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_sentence_files(
    folder: Path,
    *,
    mode: str = "cls",
    normalize: bool = True,
    longest: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    more: tuple[str, ...] = (),
) -> None:
    """Write the files that sentence-transformers puts beside a model. more: further modules."""
    names = ["Transformer", "Pooling", *more, *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if name == "Transformer" else f"{index}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    switches = {
        "pooling_mode_cls_token": mode == "cls",
        "pooling_mode_mean_tokens": mode == "mean",
        "pooling_mode_max_tokens": mode == "max",
        "pooling_mode_lasttoken": mode == "lasttoken",
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    if longest is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    if prompts is not None:
        found = {"prompts": prompts, "default_prompt_name": default_prompt}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(found))
