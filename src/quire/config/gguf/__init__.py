"""GGUF files: one file with weights, settings, tokenizer and chat template. No tensor is read."""

from quire.config.gguf.checkpoint import GGUFLayout, find_architecture, layout_of
from quire.config.gguf.header import (
    GGUF_MAGIC,
    GGUFEntry,
    GGUFHeader,
    float32,
    is_gguf,
    read_gguf_header,
    read_gguf_parts,
)
from quire.config.gguf.settings import config_of, dtype_of, end_token_ids, ends_by_text
from quire.config.gguf.tensor_types import GGML_TYPES

__all__ = [
    "GGML_TYPES",
    "GGUFEntry",
    "GGUF_MAGIC",
    "GGUFHeader",
    "GGUFLayout",
    "config_of",
    "dtype_of",
    "end_token_ids",
    "ends_by_text",
    "find_architecture",
    "float32",
    "is_gguf",
    "layout_of",
    "read_gguf_header",
    "read_gguf_parts",
]
