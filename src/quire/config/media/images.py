"""Images of a checkpoint: its description, or the reason why the model is served for text alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from quire.config.gguf import is_gguf
from quire.config.hf import RawConfig, read_json
from quire.config.media import gemma3, idefics3, qwen_vl
from quire.config.media.image_spec import IMAGE_KEY, ImageFamily, ImageSpec
from quire.config.model_spec import GenericTraits, ModelSpec
from quire.config.settings import EngineSettings
from quire.config.speculation import OF_MODELS, parse_speculation
from quire.errors import ConfigError

__all__ = ["FAMILIES", "find_images", "reads_images"]

FAMILIES: tuple[ImageFamily, ...] = (
    *idefics3.FAMILIES,
    *qwen_vl.FAMILIES,
    *gemma3.FAMILIES,
)
"""Families of models for text and images, in the order of the docs."""

_FAMILY_OF: Mapping[str, ImageFamily] = MappingProxyType(
    {kind: family for family in FAMILIES for kind in family.model_types}
)

PROCESSOR_FILE = "preprocessor_config.json"

_log = logging.getLogger("quire.config")


def reads_images(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for text and images that quire knows."""
    kind = raw.read_optional(str, "model_type")
    return kind in _FAMILY_OF and raw.has("vision_config")


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
    family = _FAMILY_OF[raw.read(str, "model_type")]
    images = family.read(raw, read_json(folder / PROCESSOR_FILE), spec.hidden_size)
    _check_text_model(images, spec, raw)
    return images


def _check_text_model(images: ImageSpec, spec: ModelSpec, raw: RawConfig) -> None:
    """Raise ConfigError for a language model that cannot take the encoder's rows."""
    if images.position_axes > spec.position_axes:
        raise ConfigError(
            f"{raw.source}: rope_parameters of the language model has no mrope_section, but images "
            f"have {images.position_axes} positions for a token; take the published file, or give "
            "limit_mm_per_prompt={'image': 0}"
        )
    if images.num_deep >= spec.num_layers:
        raise ConfigError(
            f"{raw.source}: {images.num_deep} layers of deepstack_visual_indexes are too many for "
            f"a language model of {spec.num_layers} layers; take the matching file"
        )


def _why_text_alone(folder: Path, spec: ModelSpec, settings: EngineSettings) -> str | None:
    if not settings.media_limit(IMAGE_KEY):
        return "limit_mm_per_prompt allows none"
    speculation = parse_speculation(settings.speculative_config)
    if speculation is not None and speculation.method in OF_MODELS:
        return f"speculative_config has {speculation.method}, which reads no images"
    if isinstance(spec.traits, GenericTraits):
        return "transformers computes the model (model_impl)"
    if not spec.draws_tokens:
        return "it gives vectors and no texts"
    if not (folder / PROCESSOR_FILE).is_file():
        return f"there is no {PROCESSOR_FILE}; fetch it"
    return None
