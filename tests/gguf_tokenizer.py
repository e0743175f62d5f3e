"""Vocabularies in the metadata of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Metadata of a file with the tokenizer of `folder`, byte-level BPE, and its chat template."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in stored["added_tokens"]}
    ids = {**stored["model"]["vocab"], **added}
    ordered = sorted(ids, key=lambda token: ids[token])
    merges = stored["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ordered,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in ordered],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
