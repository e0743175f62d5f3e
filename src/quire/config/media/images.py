"""Images of a checkpoint: its description, or the reason why the model is served for text alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.config.gguf import is_gguf, read_gguf_parts
from quire.config.hf import RawConfig, read_json
from quire.config.media.image_spec import IMAGE_KEY, STEPS, ImageFamily, ImageSpec
from quire.config.media.projector import open_projector
from quire.config.media.registry import FAMILIES, FAMILY_OF, PROJECTORS
from quire.config.model_spec import GenericTraits, ModelSpec
from quire.config.settings import EngineSettings
from quire.config.speculation import HEADS, parse_speculation

__all__ = ["find_images", "reads_images"]

_MMPROJ = "mmproj"

PROCESSOR_FILE = "preprocessor_config.json"
_OF_VIDEOS = ("fps", "num_frames")
"""Keys of `mm_processor_kwargs` for videos, which no model takes: examples give them beside those
for images."""

MOST_TILES, MOST_PIXELS = 1 << 10, 1 << 26
"""Tiles and pixels that are made of an image at most, over three times those of published files."""

_TEXT_ALONE = "%s: takes no images: %s"

_log = logging.getLogger("quire.config")


def reads_images(raw: RawConfig) -> bool:
    """Return whether a config.json describes a model for text and images that quire knows."""
    kind = raw.read_optional(str, "model_type")
    return kind in FAMILY_OF and raw.has("vision_config")


def find_images(folder: Path, spec: ModelSpec, settings: EngineSettings) -> ImageSpec | None:
    """Return the description of the images that the model reads; None if it reads text alone, which
    is logged with the reason where the checkpoint has more. Raises ConfigError, naming file and
    key, for images that quire does not prepare as the checkpoint wants, and for settings of images
    where there are none."""
    find = _find_in_gguf if is_gguf(folder) else _find_in_folder
    images, chosen = find(folder, spec, settings), _chosen(settings)
    if images is None and chosen:
        raise ConfigError(
            f"mm_processor_kwargs={chosen} is for images, and {folder} takes none here; leave it "
            "out"
        )
    return images


def _find_in_folder(folder: Path, spec: ModelSpec, settings: EngineSettings) -> ImageSpec | None:
    if settings.mmproj is not None:
        raise ConfigError(
            f"mmproj={settings.mmproj!r} is the image encoder of a GGUF file, and {folder} is a "
            "folder, which has its own; leave it out"
        )
    raw = read_json(folder / "config.json")
    if not reads_images(raw):
        return None
    reason = _why_text_alone(spec, settings)
    if reason is None and not (folder / PROCESSOR_FILE).is_file():
        reason = f"there is no {PROCESSOR_FILE}; fetch it"
    if reason is not None:
        _log.warning(_TEXT_ALONE, folder, reason)
        return None
    family = FAMILY_OF[raw.read(str, "model_type")]
    return _read(family, raw, read_json(folder / PROCESSOR_FILE), spec, _chosen(settings))


def _find_in_gguf(model: Path, spec: ModelSpec, settings: EngineSettings) -> ImageSpec | None:
    """Return the description of a GGUF file with an image encoder: the one that is named, or the
    one beside the model. One that is not named and does not fit is left out, and the log says so.
    """
    file, reason = None, None
    if settings.mmproj is not None:
        file = Path(settings.mmproj).expanduser()
        if not is_gguf(file):
            raise ConfigError(f"mmproj={settings.mmproj!r} is no GGUF file; name the file itself")
    else:
        beside = [
            path
            for path in sorted(model.parent.glob("*.gguf"))
            if _MMPROJ in path.name.lower() and path != model
        ]
        if not beside:
            return None
        if len(beside) > 1:
            names = ", ".join(path.name for path in beside)
            reason = f"there are several image encoders beside it ({names}); name one by mmproj"
        file = beside[0]
    reason = _why_text_alone(spec, settings) or reason
    if reason is None:
        try:
            return _read_projector(file, model, spec, _chosen(settings))
        except ConfigError as error:
            if settings.mmproj is not None:
                raise
            reason = str(error)
    _log.warning(_TEXT_ALONE, model, reason)
    return None


def _read_projector(
    file: Path, model: Path, spec: ModelSpec, chosen: Mapping[str, Any]
) -> ImageSpec:
    """Read the metadata of a GGUF file with an image encoder. Raises ConfigError: another file, or
    one of another language model."""
    opened, projector = open_projector(file, PROJECTORS)
    width = opened.size("projection_dim", spec.hidden_size)
    if width != spec.hidden_size:
        raise ConfigError(
            f"{file}: makes rows of {width} numbers for a language model of {spec.hidden_size}; "
            "take the file that was published with the model"
        )
    header = read_gguf_parts(model)
    vocabulary = header.array("tokenizer.ggml.tokens") or ()
    stated, source = projector.read(opened), str(file)
    ids = projector.token_ids(opened, vocabulary)
    architecture = header.string("general.architecture")
    if projector.models and architecture not in projector.models:
        raise ConfigError(
            f"{file}: belongs to language models of {' or '.join(projector.models)}, and {model} "
            f"is of {architecture}; take the file that was published with the model"
        )
    projector.tensors(opened)  # which refuses unknown ones before anything is loaded
    vision = {key: value for key, value in stated.vision.items() if value is not None}
    raw = RawConfig({"vision_config": vision, **stated.more, **ids}, source)
    processor = RawConfig(stated.processor, source)
    family = next(each for each in FAMILIES if each.projector is projector)
    return replace(_read(family, raw, processor, spec, chosen), file=file)


def _chosen(settings: EngineSettings) -> dict[str, Any]:
    return json.loads(settings.mm_processor_kwargs or "{}")


def _read(
    family: ImageFamily,
    raw: RawConfig,
    processor: RawConfig,
    spec: ModelSpec,
    chosen: Mapping[str, Any],
) -> ImageSpec:
    """Read the description of images. chosen: values in place of those of `processor`. Raises
    ConfigError for images that the language model cannot take, for sizes that no memory would hold,
    and for a chosen value that has no effect."""
    given = processor.overridden(chosen, "mm_processor_kwargs")
    images = family.read(raw, given, spec.hidden_size)
    for key in sorted(chosen.keys() - STEPS.keys() - set(_OF_VIDEOS)):
        try:  # no value at all is refused where somebody reads the key
            family.read(raw, given.overridden({key: object()}), spec.hidden_size)
        except ConfigError:
            continue
        raise ConfigError(
            f"mm_processor_kwargs has {key!r}, which images of {family.title} do not depend on; "
            "leave it out"
        )
    _check_text_model(images, spec, raw)
    tiles, pixels = images.most_made
    if tiles > MOST_TILES or pixels > MOST_PIXELS:
        raise ConfigError(
            f"{given.source}: an image could become {tiles:,} tiles of {pixels:,} pixels in "
            f"all, and quire makes at most {MOST_TILES:,} of {MOST_PIXELS:,}; take the published "
            f"file, or mend {images.size_keys}"
        )
    return images


def _check_text_model(images: ImageSpec, spec: ModelSpec, raw: RawConfig) -> None:
    """Raise ConfigError for a language model that cannot take the encoder's rows."""
    if images.position_axes > spec.position_axes:
        raise ConfigError(
            f"{raw.source}: rope_parameters of the language model has no mrope_section, but images "
            f"have {images.position_axes} positions for a token; take the published file, or give "
            "limit_mm_per_prompt={'image': 0}"
        )
    for token_id in images.own_ids:
        if not 0 <= token_id < spec.vocab_size:
            raise ConfigError(
                f"{raw.source}: images have the token id {token_id}, but the language model has "
                f"{spec.vocab_size} tokens; take the matching file"
            )
    if images.num_deep >= spec.num_layers:
        raise ConfigError(
            f"{raw.source}: {images.num_deep} layers of deepstack_visual_indexes are too many for "
            f"a language model of {spec.num_layers} layers; take the matching file"
        )


def _why_text_alone(spec: ModelSpec, settings: EngineSettings) -> str | None:
    if not settings.media_limit(IMAGE_KEY):
        return "limit_mm_per_prompt allows none"
    speculation = parse_speculation(settings.speculative_config)
    if speculation is not None and speculation.method in HEADS:
        return f"speculative_config has {speculation.method}, which reads no images"
    if isinstance(spec.traits, GenericTraits):
        return "transformers computes the model (model_impl)"
    if not spec.draws_tokens:
        return "it gives vectors and no texts"
    return None
