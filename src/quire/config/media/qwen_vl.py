"""Images of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923), Qwen3-VL (arXiv:2511.21631) and
Qwen3.5: one rectangle of patches of any size, in squares of neighbours that become one token each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.base.errors import ConfigError, RequestError
from quire.config.families.shared import ACTIVATIONS
from quire.config.hf import RawConfig
from quire.config.media.image_spec import (
    NUM_CHANNELS,
    STEPS,
    ImageFamily,
    ImageSpec,
    read_levels,
)
from quire.config.media.projector import Projector, ProjectorFile, Stated

__all__ = ["FAMILIES", "QwenSpec", "QwenTowerSpec", "read_qwen2_5", "read_qwen3", "read_qwen3_5"]

QKV_LAYOUT = "qkv_layout"
"""Key of `vision_config`, of GGUF files: "split" if q, k and v are tensors of their own."""

LOW_TOKENS = 256
"""Most tokens of an image with low detail."""

MOST_RATIO = 200
"""Largest ratio of the sides of an image, that of the published processor."""

_SHARED = {
    "in_channels": NUM_CHANNELS,
    "num_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_WINDOW = 112
_QWEN2_5 = {
    **_SHARED,
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": _WINDOW,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3 = {
    **_SHARED,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_PROCESSOR = {
    **STEPS,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Values of `transformers` where the files are silent."""

_GGUF_LEAST, _GGUF_MOST = 8, 4096
"""Tokens of an image where GGUF files are silent."""


@dataclass(frozen=True, slots=True)
class QwenTowerSpec:
    """The encoder of patches, and the projection to the language model.

    frames: copies of an image in a patch, which could be a video's. merge: so many neighbours on
    each axis become one token. gated: RMS norms and gated MLPs, of Qwen2.5, in place of layer norms
    and plain ones. window: pixels of a side of the square that a layer sees; 0 if all layers see
    the whole image, as `full_layers` do anyway. table_side: rows and columns of the table of
    learned positions; 0 without. deep_layers: layers that give vectors to the language model.
    splits_qkv: True if q, k and v are three tensors on disk, and not one.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    frames: int
    merge: int
    activation: str
    theta: float
    output_size: int
    gated: bool
    window: int = 0
    full_layers: tuple[int, ...] = ()
    table_side: int = 0
    deep_layers: tuple[int, ...] = ()
    splits_qkv: bool = False

    @property
    def patch_elements(self) -> int:
        return NUM_CHANNELS * self.frames * self.patch_size**2

    @property
    def square_size(self) -> int:
        """Elements of the patches of a token."""
        return self.hidden_size * self.merge**2

    @property
    def num_parameters(self) -> int:
        size, inner, square = self.hidden_size, self.intermediate_size, self.square_size
        norm = size if self.gated else 2 * size
        mlp = (2 + self.gated) * size * inner + (1 + self.gated) * inner + size
        layer = 4 * (size * size + size) + mlp + 2 * norm
        patches = size * (self.patch_elements + (not self.gated)) + self.table_side**2 * size
        merger = square * square + square + (square + 1) * self.output_size
        deep = len(self.deep_layers) * (merger + 2 * square)
        return patches + self.num_layers * layer + merger + norm + deep


@dataclass(frozen=True, slots=True)
class QwenSpec(ImageSpec):
    """min_pixels, max_pixels: bounds of a resized image."""

    preparer: ClassVar[str] = "quire.text.rendering.media.qwen_vl:QwenPreparer"
    encoder: ClassVar[str] = "quire.compute.models.towers.qwen_vl:QwenTower"
    size_keys: ClassVar[str] = "shortest_edge, min_pixels, image_min_pixels or patch_size"

    tower: QwenTowerSpec
    min_pixels: int
    max_pixels: int

    @property
    def num_parameters(self) -> int:
        return self.tower.num_parameters

    @property
    def num_deep(self) -> int:
        return len(self.tower.deep_layers)

    @property
    def position_axes(self) -> int:
        return 3

    @property
    def token_side(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.tower.patch_size * self.tower.merge

    @property
    def most_made(self) -> tuple[int, int]:
        """The pixels of the narrowest image that grows, its sides rounded up."""
        least = max(self.min_pixels, self.token_side**2)
        longer, shorter = (math.isqrt(area) for area in (least * MOST_RATIO, least // MOST_RATIO))
        return 1, (longer + self.token_side) * (shorter + self.token_side)

    def resized(self, width: int, height: int, *, is_low: bool = False) -> tuple[int, int]:
        """Return width and height of the resized image: multiples of `token_side`, with about the
        same ratio and a number of pixels within bounds. is_low: for `LOW_TOKENS` at most. Raises
        RequestError for a ratio above `MOST_RATIO`."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise RequestError(
                f"the image has {width} x {height} pixels, and one side may be at most "
                f"{MOST_RATIO} times the other: cut it"
            )
        side, most = self.token_side, self.max_pixels
        if is_low:
            most = min(most, max(self.min_pixels, LOW_TOKENS * side * side))
        # round: half to even
        wide, high = (round(pixels / side) * side for pixels in (width, height))
        if wide * high > most:
            shrink = math.sqrt(height * width / most)
            wide, high = (
                max(side, math.floor(pixels / shrink / side) * side) for pixels in (width, height)
            )
        elif wide * high < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            wide, high = (math.ceil(pixels * growth / side) * side for pixels in (width, height))
        return wide, high

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a resized image."""
        return height // self.token_side, width // self.token_side

    def num_rows(self, num_tiles: int, width: int, height: int) -> int:
        side = self.token_side
        if num_tiles != 1 or min(width, height) < side or width % side or height % side:
            return 0
        rows, columns = self.grid(width, height)
        return rows * columns

    def work_elements(self, max_tokens: int) -> int:
        tower = self.tower
        patches = min(self.max_pixels // tower.patch_size**2, max_tokens * tower.merge**2)
        deep = len(tower.deep_layers) * tower.output_size // tower.merge**2
        of_patch = 3 * tower.patch_elements + 9 * tower.hidden_size + 3 * tower.intermediate_size
        return patches * (of_patch + deep)


def read_qwen2_5(raw: RawConfig, processor: RawConfig, hidden_size: int) -> QwenSpec:
    """Read the files of Qwen2.5-VL. hidden_size: width of the language model. Raises ConfigError,
    naming the file and the key, for what quire does not compute."""
    vision = _vision(raw).with_defaults(_QWEN2_5)
    tower = _read_tower(
        vision,
        hidden_size,
        gated=True,
        window=vision.read_size("window_size"),
        full_layers=vision.read_list(int, "fullatt_block_indexes") or (),
    )
    step = tower.patch_size * tower.merge
    if tower.window % step:
        raise ConfigError(
            f"{vision.source}: window_size={tower.window} is not a multiple of the {step} pixels "
            "of a token (patch_size, spatial_merge_size)"
        )
    return _read_spec(raw, processor, tower, image_token=151655)


def read_qwen3(raw: RawConfig, processor: RawConfig, hidden_size: int) -> QwenSpec:
    """Read the files of Qwen3-VL; arguments and errors as of `read_qwen2_5`."""
    deep = {"deepstack_visual_indexes": [8, 16, 24]}
    return _read_qwen3(raw, _vision(raw).with_defaults(deep), processor, hidden_size, 151655)


def read_qwen3_5(raw: RawConfig, processor: RawConfig, hidden_size: int) -> QwenSpec:
    """Read the files of Qwen3.5, with the encoder of Qwen3-VL, but for DeepStack; arguments and
    errors as of `read_qwen2_5`."""
    vision = _vision(raw)
    vision = RawConfig({**vision.as_dict(), "deepstack_visual_indexes": []}, vision.source)
    return _read_qwen3(raw, vision, processor, hidden_size, 248056)


def _read_qwen3(
    raw: RawConfig, vision: RawConfig, processor: RawConfig, hidden_size: int, image_token: int
) -> QwenSpec:
    vision = vision.with_defaults(_QWEN3)
    num_positions = vision.read_size("num_position_embeddings")
    side = math.isqrt(num_positions)
    if side * side != num_positions:
        raise ConfigError(
            f"{vision.source}: num_position_embeddings={num_positions} is no square; take the "
            "matching file"
        )
    deep = vision.read_list(int, "deepstack_visual_indexes") or ()
    tower = _read_tower(vision, hidden_size, gated=False, table_side=side, deep_layers=deep)
    if len(set(deep)) < len(deep) or not all(0 <= layer < tower.num_layers for layer in deep):
        raise ConfigError(
            f"{vision.source}: deepstack_visual_indexes={list(deep)} must be different layers from "
            f"0 to {tower.num_layers - 1}"
        )
    return _read_spec(raw, processor, tower, image_token)


def _vision(raw: RawConfig) -> RawConfig:
    return raw.section("vision_config") or RawConfig({}, raw.source)


def _read_tower(
    vision: RawConfig,
    output_size: int,
    *,
    gated: bool,
    window: int = 0,
    full_layers: tuple[int, ...] = (),
    table_side: int = 0,
    deep_layers: tuple[int, ...] = (),
) -> QwenTowerSpec:
    channels = vision.read(int, "in_chans", "in_channels")
    if channels != NUM_CHANNELS:
        raise vision.unsupported("in_channels", channels, [str(NUM_CHANNELS)])
    rope = vision.section("rope_parameters")
    tower = QwenTowerSpec(
        hidden_size=vision.read_size("hidden_size"),
        intermediate_size=vision.read_size("intermediate_size"),
        num_layers=vision.read_size("depth"),
        num_heads=vision.read_size("num_heads"),
        patch_size=vision.read_size("patch_size"),
        frames=vision.read_size("temporal_patch_size"),
        merge=vision.read_size("spatial_merge_size"),
        activation=vision.read_choice(ACTIVATIONS, "hidden_act", default="silu"),
        theta=10000.0 if rope is None else rope.read(float, "rope_theta", default=10000.0),
        output_size=output_size,
        gated=gated,
        window=window,
        full_layers=full_layers,
        table_side=table_side,
        deep_layers=deep_layers,
        splits_qkv=vision.read_optional(str, QKV_LAYOUT) == "split",
    )
    if tower.hidden_size % (4 * tower.num_heads):
        raise ConfigError(
            f"{vision.source}: hidden_size={tower.hidden_size} of {tower.num_heads} heads gives no "
            "heads of a multiple of 4 elements, which positions on two axes turn"
        )
    given = vision.read_size("out_hidden_size", default=output_size)
    if given != output_size:
        raise ConfigError(
            f"{vision.source}: out_hidden_size={given} does not fit a language model of "
            f"{output_size}; take the matching file"
        )
    return tower


def _read_spec(
    raw: RawConfig, processor: RawConfig, tower: QwenTowerSpec, image_token: int
) -> QwenSpec:
    processor = processor.with_defaults(_PROCESSOR)
    for key, wanted in (
        ("patch_size", tower.patch_size),
        ("temporal_patch_size", tower.frames),
        ("merge_size", tower.merge),
    ):
        if (found := processor.read_size(key)) != wanted:
            raise ConfigError(
                f"{processor.source}: {key}={found} does not fit an encoder with {wanted}; take "
                "the matching files"
            )
    size = processor.section("size") or RawConfig({}, processor.source)
    least = size.read_size("shortest_edge", default=_MIN_PIXELS)
    most = size.read_size("longest_edge", default=_MAX_PIXELS)
    least = processor.read_size("min_pixels", default=least)
    most = processor.read_size("max_pixels", default=most)
    if most < max(least, (tower.patch_size * tower.merge) ** 2):
        raise ConfigError(
            f"{processor.source}: at most {most} pixels and at least {least} leave no size for an "
            "image; take the published file"
        )
    return QwenSpec(
        token_id=raw.read(int, "image_token_id", default=image_token),
        levels=read_levels(processor),
        tower=tower,
        min_pixels=least,
        max_pixels=most,
    )


def _stated(file: ProjectorFile, **more: Any) -> Stated:
    """Return what files of both generations say. Those without bounds of pixels have the ones that
    llama.cpp takes then. more: more values of `vision_config`."""
    vision = file.sizes(
        hidden_size="embedding_length",
        intermediate_size="feed_forward_length",
        depth="block_count",
        num_heads="attention.head_count",
        patch_size="patch_size",
    )
    merge = file.size("spatial_merge_size", _SHARED["spatial_merge_size"])
    square = (vision["patch_size"] * merge) ** 2
    least, most = (
        file.size(f"image_{end}_pixels", tokens * square)
        for end, tokens in (("min", _GGUF_LEAST), ("max", _GGUF_MOST))
    )
    processor = {
        **file.levels(),
        "patch_size": vision["patch_size"],
        "merge_size": merge,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    own = {"spatial_merge_size": merge, "hidden_act": file.activation(), **more}
    return Stated({**vision, **own}, processor)


def _stated_by_qwen2_5(file: ProjectorFile) -> Stated:
    """Each n-th layer sees the whole image; n is `n_wa_pattern`."""
    every, depth = file.size("n_wa_pattern"), file.num_blocks
    is_split = "v.blk.0.attn_q.weight" in file.header.tensors
    return _stated(
        file,
        window_size=file.size("window_size", _WINDOW),
        fullatt_block_indexes=list(range(every - 1, depth, every)),
        **({QKV_LAYOUT: "split"} if is_split else {}),
    )


def _stated_by_qwen3(file: ProjectorFile) -> Stated:
    table = file.header.tensors.get("v.position_embd.weight")
    return _stated(
        file,
        num_position_embeddings=None if table is None else table.shape[0],
        deepstack_visual_indexes=file.deep_layers,
    )


_BLOCK = {
    "ln1": "norm1",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ln2": "norm2",
}
_TOKENS = {"image_token_id": ("<|image_pad|>",)}
_QWEN2_5_PROJECTOR = Projector(
    name="qwen2.5vl_merger",
    outer={
        "v.patch_embd": "visual.patch_embed.proj",
        "v.post_ln": "visual.merger.ln_q",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    },
    blocks="visual.blocks.{}.",
    block={
        **_BLOCK,
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    tokens=_TOKENS,
    models=("qwen2vl",),
    read=_stated_by_qwen2_5,
)
_QWEN3_PROJECTOR = Projector(
    name="qwen3vl_merger",
    outer={
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    },
    blocks="visual.blocks.{}.",
    block={**_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    deep="visual.deepstack_merger_list.{}.",
    deep_part={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    tokens=_TOKENS,
    models=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
    read=_stated_by_qwen3,
)

FAMILIES = (
    ImageFamily("Qwen2.5-VL", ("qwen2_5_vl",), read_qwen2_5, _QWEN2_5_PROJECTOR),
    ImageFamily("Qwen3-VL", ("qwen3_vl",), read_qwen3, _QWEN3_PROJECTOR),
    ImageFamily("Qwen3.5", ("qwen3_5", "qwen3_5_moe"), read_qwen3_5),
)
