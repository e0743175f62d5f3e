"""Images of a checkpoint: its description, or the reason why the model is served for text alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from quire.config.gguf import is_gguf
from quire.config.hf import RawConfig, read_json
from quire.config.media.idefics3 import IMAGE_KEY, ImageSpec, read_images
from quire.config.model_spec import GenericTraits, ModelSpec
from quire.config.settings import EngineSettings

__all__ = ["READERS", "find_images", "reads_images"]

READERS: Mapping[str, Callable[[RawConfig, RawConfig, int], ImageSpec]] = MappingProxyType(
    {"idefics3": read_images, "smolvlm": read_images}
)
"""Readers of config.json, preprocessor_config.json and the language model's hidden size, by the
`model_type` of a model for text and images."""

PROCESSOR_FILE = "preprocessor_config.json"

_log = logging.getLogger("quire.config")


def reads_images(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for text and images that quire knows."""
    kind = raw.read_optional(str, "model_type")
    return kind in READERS and raw.has("vision_config")


def find_images(folder: Path, spec: ModelSpec, settings: EngineSettings) -> ImageSpec | None:
    """Return the description of the images that the model reads; None if it reads text alone, which
    is logged with the reason where the checkpoint has more. Raises ConfigError, naming file and
    key, for images that quire does not prepare as the checkpoint wants."""
    if is_gguf(folder):
        return None
    raw = read_json(folder / "config.json")
    if not reads_images(raw):
        return None
    reason = _why_text_alone(folder, spec, settings)
    if reason is not None:
        _log.warning("%s: takes no images: %s", folder, reason)
        return None
    reader = READERS[raw.read(str, "model_type")]
    return reader(raw, read_json(folder / PROCESSOR_FILE), spec.hidden_size)


def _why_text_alone(folder: Path, spec: ModelSpec, settings: EngineSettings) -> str | None:
    if not settings.media_limit(IMAGE_KEY):
        return "limit_mm_per_prompt allows none"
    if settings.tensor_parallel_size > 1:
        return "tensor_parallel_size is above 1, and ranks share no image encoder yet"
    if settings.speculative_config is not None:
        return "speculative_config is given, and drafts do not read images yet"
    if isinstance(spec.traits, GenericTraits):
        return "transformers computes the model (model_impl)"
    if not spec.draws_tokens:
        return "it gives vectors and no texts"
    if not (folder / PROCESSOR_FILE).is_file():
        return f"there is no {PROCESSOR_FILE}; fetch it"
    return None
