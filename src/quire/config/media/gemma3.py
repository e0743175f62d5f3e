"""Images of Gemma 3 (Gemma Team 2025, arXiv:2503.19786, section 2.1): one square of pixels through
SigLIP (arXiv:2303.15343), with squares of neighbours averaged to one token each. The tokens of an
image see each other. A long image may be shown in parts too ("pan & scan", section 2.1 there).
"""

from __future__ import annotations

import math
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

__all__ = ["FAMILIES", "Gemma3ImageSpec", "PanAndScan", "read_images"]

_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_PROCESSOR = {**PROCESSOR, "resample": 2}
"""Values of `transformers` where the files are silent."""

_POOL = 4
"""`Gemma3ImageSpec.pool` where GGUF files are silent."""


Box = tuple[int, int, int, int]
"""Left, upper, right and lower edge of a part of an image, in pixels."""


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """Crops of an image, in a row along its longer side.

    min_size: least pixels of a side of a crop. max_crops: most crops of an image. min_ratio: least
    ratio of the sides of an image that has crops.
    """

    min_size: int
    max_crops: int
    min_ratio: float

    def boxes(self, width: int, height: int) -> list[Box]:
        """Return the crops of an image; none if it is not long or not large enough. All are
        equally long, but for the last one, which ends with the image."""
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self.min_ratio:
            return []
        wanted = min(math.floor(longer / shorter + 0.5), longer // self.min_size)
        size = math.ceil(longer / min(max(wanted, 2), self.max_crops))
        if min(size, shorter) < self.min_size:
            return []
        spans = [(start, min(start + size, longer)) for start in range(0, longer, size)]
        if width >= height:
            return [(start, 0, end, height) for start, end in spans]
        return [(0, start, width, end) for start, end in spans]


@dataclass(frozen=True, slots=True)
class Gemma3ImageSpec(ImageSpec):
    """tower: encoder of the square. tokens_per_side: tokens of a square on each axis. output_size:
    elements of a token, those of the language model. begin_id, end_id: tokens around a square.
    crops: None if an image is one square, whatever its size.
    """

    preparer: ClassVar[str] = "quire.text.rendering.media.gemma3:Gemma3Preparer"
    encoder: ClassVar[str] = "quire.compute.models.towers.gemma3:Gemma3Tower"
    size_keys: ClassVar[str] = "size, image_size or pan_and_scan_max_num_crops"

    tower: SiglipSpec
    tokens_per_side: int
    output_size: int
    begin_id: int
    end_id: int
    crops: PanAndScan | None = None

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.token_id, self.begin_id, self.end_id

    @property
    def place_id(self) -> int:
        return self.begin_id

    @property
    def line_ends(self) -> int:
        return 2

    @property
    def whole_tokens(self) -> int:
        return self.tokens_per_side**2

    @property
    def pool(self) -> int:
        """Patches on each axis that become one token."""
        return self.tower.patches_per_side // self.tokens_per_side

    @property
    def num_parameters(self) -> int:
        size = self.tower.hidden_size
        return self.tower.num_parameters + size + size * self.output_size

    @property
    def most_made(self) -> tuple[int, int]:
        tiles = 1 if self.crops is None else 1 + self.crops.max_crops
        return tiles, tiles * self.tower.tile_size**2

    def num_rows(self, num_tiles: int, width: int, height: int) -> int:
        fits = num_tiles <= self.most_made[0] and width == height == self.tower.tile_size
        return num_tiles * self.whole_tokens if fits else 0

    def work_elements(self, max_tokens: int) -> int:
        del max_tokens  # one square after the other
        return self.tower.activation_elements


def read_images(raw: RawConfig, processor: RawConfig, hidden_size: int) -> Gemma3ImageSpec:
    """Read config.json and preprocessor_config.json. hidden_size: width of the language model.
    Raises ConfigError, naming the file and the key, for what quire does not compute."""
    processor = processor.with_defaults(_PROCESSOR)
    tower = read_siglip(raw.section("vision_config") or RawConfig({}, raw.source), _TOWER)
    num_tokens = raw.read_size("mm_tokens_per_image", default=256)
    per_side = math.isqrt(num_tokens)
    patches = tower.patches_per_side
    if tower.tile_size % tower.patch_size or per_side**2 != num_tokens or patches % per_side:
        raise ConfigError(
            f"{raw.source}: mm_tokens_per_image={num_tokens} is no square whose side divides the "
            f"patches of a side, {tower.tile_size} / {tower.patch_size}; take the published file"
        )
    size = processor.section("size") or RawConfig({}, processor.source)
    sides = [size.read_size(key, default=224) for key in ("height", "width")]
    if sides != [tower.tile_size] * 2:
        raise ConfigError(
            f"{processor.source}: images of {sides[1]} x {sides[0]} pixels do not fit an encoder "
            f"for {tower.tile_size} x {tower.tile_size}; take the matching files"
        )
    return Gemma3ImageSpec(
        token_id=raw.read(int, "image_token_index", "image_token_id", default=262144),
        levels=read_levels(processor),
        tower=tower,
        tokens_per_side=per_side,
        output_size=hidden_size,
        begin_id=raw.read(int, "boi_token_index", "boi_token_id", default=255999),
        end_id=raw.read(int, "eoi_token_index", "eoi_token_id", default=256000),
        crops=_read_crops(processor),
    )


def _read_crops(processor: RawConfig) -> PanAndScan | None:
    """Read the settings of pan & scan; None if it is off. The defaults are those of the processor
    of `transformers`, as published files have null."""
    crops = PanAndScan(
        min_size=processor.read_size("pan_and_scan_min_crop_size", default=256),
        max_crops=processor.read_size("pan_and_scan_max_num_crops", default=4),
        min_ratio=processor.read(float, "pan_and_scan_min_ratio_to_activate", default=1.2),
    )
    return crops if processor.read(bool, "do_pan_and_scan", default=False) else None


def _stated(file: ProjectorFile) -> Stated:
    side, pool = file.size("image_size"), file.size("projector.scale_factor", _POOL)
    per_side = side // file.size("patch_size") // pool
    processor = {**file.levels(), "size": {"height": side, "width": side}}
    return Stated(siglip_of(file), processor, {"mm_tokens_per_image": per_side**2})


_PROJECTOR = Projector(
    name="gemma3",
    outer={
        **siglip_names("vision_tower"),
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        "mm.input_projection": "multi_modal_projector.mm_input_projection",
    },
    blocks="vision_tower.encoder.layers.{}.",
    block=SIGLIP_BLOCK,
    tokens={
        "image_token_index": ("<image_soft_token>", "<pad>"),  # any that is in no text of an image
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
    },
    read=_stated,
    adds_one=("mm.soft_emb_norm",),
)

FAMILIES = (ImageFamily("Gemma 3", ("gemma3",), read_images, _PROJECTOR),)
