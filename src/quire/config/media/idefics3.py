"""Images of Idefics 3 and SmolVLM (Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025,
arXiv:2504.05299): square tiles and the whole image, each through SigLIP (arXiv:2303.15343), with
neighbours joined to fewer tokens (pixel shuffle).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quire.config.families.shared import ACTIVATIONS
from quire.config.hf import RawConfig
from quire.config.media.image_spec import (
    NUM_CHANNELS,
    STEPS,
    ImageFamily,
    ImageSpec,
    read_levels,
)
from quire.errors import ConfigError

__all__ = ["FAMILIES", "IdeficsSpec", "TowerSpec", "read_images"]

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
_PROCESSOR = {
    **STEPS,
    "do_image_splitting": True,
    "resample": 1,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Values of `transformers` where the files are silent."""


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """The encoder of tiles, and the projection to the language model.

    tile_size: pixels of a side of a tile. scale: so many neighbours on each axis become one token.
    output_size: elements of a token, those of the language model.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    tile_size: int
    activation: str
    norm_eps: float
    scale: int
    output_size: int

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return (self.patches_per_side // self.scale) ** 2

    @property
    def num_parameters(self) -> int:
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * (size * size + size) + 2 * size * inner + inner + size + 4 * size
        patches = size * (NUM_CHANNELS * self.patch_size**2 + 1) + self.patches_per_side**2 * size
        projection = size * self.scale**2 * self.output_size
        return patches + self.num_layers * layer + 2 * size + projection

    @property
    def activation_elements(self) -> int:
        """Elements that the encoder holds at once for a tile."""
        size, patches = self.hidden_size, self.patches_per_side**2
        of_pixels = 2 * NUM_CHANNELS * self.tile_size**2
        inner = max(2 * self.intermediate_size, 5 * size)
        return of_pixels + patches * (3 * size + inner) + self.num_heads * patches**2


@dataclass(frozen=True, slots=True)
class IdeficsSpec(ImageSpec):
    """longest_edge: pixels of the longer side of a resized image, before it is cut. splits: False
    if an image is never cut into tiles."""

    preparer: ClassVar[str] = "quire.rendering.media.idefics3:IdeficsPreparer"
    encoder: ClassVar[str] = "quire.models.towers.siglip:SiglipTower"

    tower: TowerSpec
    longest_edge: int
    splits: bool

    @property
    def num_parameters(self) -> int:
        return self.tower.num_parameters

    def num_rows(self, num_tiles: int, width: int, height: int) -> int:
        fits = width == height == self.tower.tile_size
        return num_tiles * self.tower.tokens_per_tile if fits else 0

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
    vision = (raw.section("vision_config") or RawConfig({}, raw.source)).with_defaults(_TOWER)
    processor = processor.with_defaults(_PROCESSOR)
    if vision.read(int, "num_channels") != NUM_CHANNELS:
        raise vision.unsupported("num_channels", vision.read(int, "num_channels"), ["3"])
    tower = TowerSpec(
        hidden_size=vision.read_size("hidden_size"),
        intermediate_size=vision.read_size("intermediate_size"),
        num_layers=vision.read_size("num_hidden_layers"),
        num_heads=vision.read_size("num_attention_heads"),
        patch_size=vision.read_size("patch_size"),
        tile_size=vision.read_size("image_size"),
        activation=vision.read_choice(ACTIVATIONS, "hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=vision.read(float, "layer_norm_eps"),
        scale=raw.read_size("scale_factor", default=2),
        output_size=hidden_size,
    )
    tile = _edge(processor, "max_image_size", tower.tile_size)
    step = tower.patch_size * tower.scale
    if tile != tower.tile_size or tile % step or tower.hidden_size % tower.num_heads:
        raise ConfigError(
            f"{processor.source}: tiles of {tile} pixels do not fit an encoder for "
            f"{tower.tile_size} pixels in patches of {tower.patch_size}, {tower.scale} x "
            f"{tower.scale} of them to a token, with {tower.num_heads} heads of "
            f"{tower.hidden_size} elements; take the matching files"
        )
    return IdeficsSpec(
        token_id=raw.read(int, "image_token_id", default=128257),
        levels=read_levels(processor),
        tower=tower,
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

FAMILIES = (ImageFamily("SmolVLM, SmolVLM2, Idefics 3", ("idefics3", "smolvlm"), read_images),)
