"""The front's part of a model: text rendering, end tokens, and its authors' sampling values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quire.config import ModelSpec
from quire.config.hub import resolve_tokenizer_folder
from quire.config.media.image_spec import IMAGE_KEY
from quire.config.model_spec import DTYPE_BYTES, ClassesSpec
from quire.config.sentence import SentenceSettings, read_sentence_settings
from quire.config.settings import EngineSettings
from quire.engine.provenance import Provenance
from quire.text.rendering import Renderer
from quire.text.rendering.media.fetch import ImageFetcher
from quire.text.rendering.media.images import ImageBounds, ImageRenderer
from quire.text.rendering.media.sources import MediaAccess
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["ModelFront", "load_model_front", "load_tokenizer"]

_log = logging.getLogger("quire.engine")


@dataclass(frozen=True, slots=True)
class ModelFront:
    """eos_token_ids: tokens that end a sequence, of the checkpoint's configs, and the tokenizer's
    own, which in a chat model may be the only one that ends a turn. default_sampling: sampling
    parameters that the model's authors recommend. sentences: defaults that turn hidden states into
    vectors. classes, is_encoder: see `ModelSpec`. provenance: makes receipts."""

    renderer: Renderer
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, object]
    provenance: Provenance
    sentences: SentenceSettings = field(default_factory=SentenceSettings)
    classes: ClassesSpec | None = None
    is_encoder: bool = False


def load_model_front(settings: EngineSettings, folder: Path, spec: ModelSpec) -> ModelFront:
    """Read tokenizer and chat template; no weights. folder: local folder of the checkpoint.

    Raises ConfigError if the tokenizer is missing or broken. Without a chat template that works the
    model can't chat.
    """
    renderer = _load_renderer(settings, folder, spec)
    tokenizer = renderer.tokenizer
    if renderer.chat_template is not None:
        for words in renderer.chat_template.why_broken.values():
            _log.warning("%s", words)
    own = None if tokenizer is None else tokenizer.eos_token_id
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        _log.warning(
            "The tokenizer has %d tokens, the model %d: texts that have one of the others are "
            "refused. Is it the model's own, or did it get tokens that the model did not?",
            tokenizer.vocab_size,
            spec.vocab_size,
        )
    missing = [i for i in spec.eos_token_ids if not 0 <= i < spec.vocab_size]
    if missing:
        _log.warning(
            "%s: eos_token_id %s of config.json or generation_config.json is no token of the model,"
            " which has %d: it ends nothing.",
            folder,
            ", ".join(map(str, missing)),
            spec.vocab_size,
        )
    return ModelFront(
        renderer=renderer,
        eos_token_ids=frozenset((*spec.eos_token_ids, *(() if own is None else (own,)))),
        default_sampling=spec.generation.sampling(),
        provenance=Provenance(settings, folder, renderer, spec.images),
        sentences=read_sentence_settings(
            folder,
            is_encoder=spec.is_encoder,
            classes="classify" if spec.classes is None else spec.classes.pooling,
        ),
        classes=spec.classes,
        is_encoder=spec.is_encoder,
    )


def load_tokenizer(settings: EngineSettings, folder: Path) -> Tokenizer:
    """Load the model's tokenizer alone; errors and `folder` as of `load_model_front`."""
    return Tokenizer.from_folder(_tokenizer_folder(settings, folder))


def _tokenizer_folder(settings: EngineSettings, folder: Path) -> Path:
    if settings.tokenizer is None:
        return folder
    return resolve_tokenizer_folder(
        settings.tokenizer, settings.model, settings.revision, settings.download_dir
    )


def _load_renderer(settings: EngineSettings, folder: Path, spec: ModelSpec) -> Renderer:
    return Renderer.from_folder(
        _tokenizer_folder(settings, folder),
        vocab_size=spec.vocab_size,
        skip_tokenizer_init=settings.skip_tokenizer_init,
        chat_template=settings.chat_template,
        control_tokens_in_content=settings.control_tokens_in_content,
        images=None if spec.images is None else partial(_image_renderer, settings, spec),
        finds_message_ends=bool(spec.states),
    )


def _image_renderer(
    settings: EngineSettings, spec: ModelSpec, tokenizer: Tokenizer
) -> ImageRenderer:
    images = spec.images
    assert images is not None, "it is made for a model with images alone"
    local, hosts = settings.allowed_local_media_path, settings.allowed_media_domains
    fetch = None if hosts is None else ImageFetcher(hosts.split(","), settings.max_image_bytes)
    access = MediaAccess(
        settings.max_image_bytes,
        settings.max_image_pixels,
        None if local is None else Path(local),
        fetch,
    )
    element = DTYPE_BYTES.get(settings.dtype, spec.dtype_bytes)
    bounds = ImageBounds(
        max_images=settings.media_limit(IMAGE_KEY),
        max_open_bytes=settings.image_memory,
        row_bytes=(1 + images.num_deep) * spec.hidden_size * element,
        takes_rows=settings.enable_mm_embeds,
    )
    return ImageRenderer(images, tokenizer, access, bounds)
