"""Images of Idefics 3 and SmolVLM (Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025,
arXiv:2504.05299): square tiles and the whole image, each through SigLIP (arXiv:2303.15343), with
neighbours joined to fewer tokens (pixel shuffle).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.media.image_spec import ImageFamily, ImageSpec, read_levels
from quire.config.media.projector import Projector, ProjectorFile, Stated
from quire.config.media.siglip import (
    PROCESSOR,
    SIGLIP_BLOCK,
    SiglipSpec,
    read_siglip,
    siglip_names,
    siglip_of,
)

__all__ = ["FAMILIES", "IdeficsSpec", "read_images"]

LONGEST_EDGE = 4096
"""Largest side of a resized image, whatever the checkpoint asks for."""

_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_PROCESSOR = {**PROCESSOR, "do_image_splitting": True, "resample": 1}
"""Values of `transformers` where the files are silent."""


@dataclass(frozen=True, slots=True)
class IdeficsSpec(ImageSpec):
    """tower: encoder of tiles. scale: so many neighbours on each axis become one token.
    output_size: elements of a token, those of the language model. longest_edge: pixels of the
    longer side of a resized image, before it is cut. splits: False if an image is never cut into
    tiles."""

    preparer: ClassVar[str] = "quire.text.rendering.media.idefics3:IdeficsPreparer"
    encoder: ClassVar[str] = "quire.compute.models.towers.idefics3:IdeficsTower"
    size_keys: ClassVar[str] = "size, max_image_size or image_size"

    tower: SiglipSpec
    scale: int
    output_size: int
    longest_edge: int
    splits: bool

    @property
    def tokens_per_tile(self) -> int:
        return (self.tower.patches_per_side // self.scale) ** 2

    @property
    def num_parameters(self) -> int:
        projection = self.tower.hidden_size * self.scale**2 * self.output_size
        return self.tower.num_parameters + projection

    @property
    def most_made(self) -> tuple[int, int]:
        side = math.ceil(min(self.longest_edge, LONGEST_EDGE) / self.tower.tile_size)
        tiles = side * side + 1 if self.splits and side > 1 else 1
        return tiles, tiles * self.tower.tile_size**2

    def num_rows(self, num_tiles: int, width: int, height: int) -> int:
        fits = width == height == self.tower.tile_size
        return num_tiles * self.tokens_per_tile if fits else 0

    def work_elements(self, max_tokens: int) -> int:
        del max_tokens  # one tile after the other
        return self.tower.activation_elements

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the image before it is made a multiple of tiles."""
        width, height = _fitted(width, height, self.longest_edge, is_even=True)
        if max(width, height) > LONGEST_EDGE:
            width, height = _fitted(width, height, LONGEST_EDGE, is_even=False)
        return max(width, 1), max(height, 1)

    def grid(self, width: int, height: int, *, splits: bool) -> tuple[int, int]:
        """Return rows and columns of tiles of an image of so many pixels; (1, 1): the image is one
        tile, and (0, 0) is never returned. splits: False for one tile of any image."""
        if not (splits and self.splits):
            return 1, 1
        width, height = self.resized(width, height)
        ratio, tile = width / height, self.tower.tile_size
        if width >= height:
            columns = math.ceil(width / tile)
            return math.ceil(int(columns * tile / ratio) / tile), columns
        rows = math.ceil(height / tile)
        return rows, math.ceil(int(rows * tile * ratio) / tile)

    def num_tiles(self, width: int, height: int, *, splits: bool = True) -> int:
        """Count the tiles of an image, and the whole image as one more unless it is the only."""
        rows, columns = self.grid(width, height, splits=splits)
        return 1 if rows * columns == 1 else rows * columns + 1


def _fitted(width: int, height: int, longest: int, *, is_even: bool) -> tuple[int, int]:
    """Return sizes with the longer one `longest`, and the other one rounded down, or to an even
    number."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(other + (is_even and other % 2), 1)
    other = int(longest * ratio)
    return max(other + (is_even and other % 2), 1), longest


def read_images(raw: RawConfig, processor: RawConfig, hidden_size: int) -> IdeficsSpec:
    """Read config.json and preprocessor_config.json. hidden_size: width of the language model.
    Raises ConfigError, naming the file and the key, for what quire does not compute."""
    processor = processor.with_defaults(_PROCESSOR)
    tower = read_siglip(raw.section("vision_config") or RawConfig({}, raw.source), _TOWER)
    scale = raw.read_size("scale_factor", default=2)
    tile = _edge(processor, "max_image_size", tower.tile_size)
    if tile != tower.tile_size or tile % (tower.patch_size * scale):
        raise ConfigError(
            f"{processor.source}: tiles of {tile} pixels do not fit an encoder for "
            f"{tower.tile_size} pixels in patches of {tower.patch_size}, {scale} x {scale} of "
            "them to a token; take the matching files"
        )
    return IdeficsSpec(
        token_id=raw.read(int, "image_token_id", default=128257),
        levels=read_levels(processor),
        tower=tower,
        scale=scale,
        output_size=hidden_size,
        longest_edge=_edge(processor, "size", 4 * 364),
        splits=processor.read(bool, "do_image_splitting"),
    )


def _edge(processor: RawConfig, key: str, default: int) -> int:
    section = processor.section(key)
    return default if section is None else section.read_size("longest_edge")


TEXTS: Mapping[str, str] = {
    "image": "<image>",
    "edge": "<fake_token_around_image>",
    "whole": "<global-img>",
    "tile": "<row_{}_col_{}>",
}
"""Texts around the tokens of tiles."""


def _stated(file: ProjectorFile) -> Stated:
    tile = file.size("image_size")
    processor = {
        **file.levels(),
        "size": {"longest_edge": file.size("preproc_image_size", 4 * tile)},
        "max_image_size": {"longest_edge": tile},
    }
    return Stated(siglip_of(file), processor, {"scale_factor": file.size("projector.scale_factor")})


_PROJECTOR = Projector(
    name="idefics3",
    outer={
        **siglip_names("vision_model"),
        "mm.model.fc": "connector.modality_projection.proj",
    },
    blocks="vision_model.encoder.layers.{}.",
    block=SIGLIP_BLOCK,
    tokens={"image_token_id": (TEXTS["image"],)},
    read=_stated,
)

FAMILIES = (
    ImageFamily("SmolVLM, SmolVLM2, Idefics 3", ("idefics3", "smolvlm"), read_images, _PROJECTOR),
)
