"""Families of models for text and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.config.checkpoint import Checkpoint
from quire.config.media import gemma3, idefics3, qwen_vl
from quire.config.media.image_spec import ImageFamily, ImageSpec
from quire.config.media.projector import open_projector

__all__ = ["FAMILIES", "FAMILY_OF", "PROJECTORS", "with_tower"]

FAMILIES: tuple[ImageFamily, ...] = (
    *idefics3.FAMILIES,
    *qwen_vl.FAMILIES,
    *gemma3.FAMILIES,
)
"""Families of models for text and images, in the order of the docs."""

FAMILY_OF: Mapping[str, ImageFamily] = MappingProxyType(
    {kind: family for family in FAMILIES for kind in family.model_types}
)

PROJECTORS = MappingProxyType(
    {each.projector.name: each.projector for each in FAMILIES if each.projector is not None}
)
"""GGUF files with an image encoder, by the type that they state."""


def with_tower(checkpoint: Checkpoint, images: ImageSpec | None) -> Checkpoint:
    """Return the checkpoint with the tensors of an image encoder that has a file of its own, else
    as it is. Raises ConfigError for a file without an image encoder."""
    if images is None or images.file is None:
        return checkpoint
    opened, projector = open_projector(images.file, PROJECTORS)
    return replace(
        checkpoint,
        files=(*checkpoint.files, images.file),
        others=projector.tensors(opened),
    )
