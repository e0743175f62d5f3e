"""Description of the images that a model reads, as the families of image encoders fill it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.media.projector import Projector

__all__ = ["IMAGE_KEY", "NUM_CHANNELS", "ImageFamily", "ImageSpec", "PixelLevels", "read_levels"]

IMAGE_KEY = "image"
"""Name of images in `limit_mm_per_prompt` and `multi_modal_data`."""

NUM_CHANNELS = 3
_RESAMPLING = range(6)
_LARGEST_LEVEL = 1e4
"""Largest number that a pixel may become; floats of 16 bits end at 65504."""

STEPS: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
}
"""Steps that preprocessor_config.json may switch off, with their values where it is silent."""


@dataclass(frozen=True, slots=True)
class PixelLevels:
    """The way from an image to numbers. resample: Pillow's number of the filter. factor: multiplier
    of levels. mean, std: values for each channel, which norm the product."""

    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ImageSpec(ABC):
    """Images of a model: the way from an image to tokens of a prompt. Each family has a subclass.

    preparer: "module:class" of `ImagePreparer`, imported by the front. encoder: "module:class" of
    `ImageTower`, imported by workers. size_keys: keys of the files that `most_made` follows from.
    token_id: image token of the language model. file: GGUF file with the encoder alone; None if the
    model's own files have it.
    """

    preparer: ClassVar[str]
    encoder: ClassVar[str]
    size_keys: ClassVar[str]

    token_id: int
    levels: PixelLevels
    file: Path | None = field(default=None, kw_only=True, repr=False)

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the encoder."""

    @property
    def num_deep(self) -> int:
        """Vectors of a row beside its embedding. The k-th of them is added behind layer k of the
        language model (DeepStack, Meng et al. 2024, arXiv:2406.04334)."""
        return 0

    @property
    def place_id(self) -> int:
        """Token of a prompt in whose place an image comes."""
        return self.token_id

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Token ids that quire writes into prompts with images, or looks for."""
        return self.token_id, self.place_id

    @property
    @abstractmethod
    def most_made(self) -> tuple[int, int]:
        """Most tiles of an image, and most pixels that are made of one of any size: numbers that
        follow from the checkpoint's files. Pixels that the image had before do not count."""

    @property
    def line_ends(self) -> int:
        """Line ends before and behind the tokens of an image, which may be one token with those of
        the text beside them."""
        return 0

    @property
    def whole_tokens(self) -> int:
        """Most tokens of an image that see each other, so that a step computes all of them or none;
        0 if a token sees those before it alone."""
        return 0

    @property
    def position_axes(self) -> int:
        """Number of positions that the language model must have for a token."""
        return 1

    @abstractmethod
    def num_rows(self, num_tiles: int, width: int, height: int) -> int:
        """Count the rows that the encoder makes of so many tiles of these pixels; 0 for tiles that
        it does not take. The front counts places by it, and the worker rows."""

    @abstractmethod
    def work_elements(self, max_tokens: int) -> int:
        """Elements that the encoder holds at once. max_tokens: most tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """A family of models for text and images. Everything else follows from it.

    title: name in the docs. model_types: values in config.json that name it. read: reader of
    config.json, preprocessor_config.json and the language model's hidden size. projector: GGUF
    files with its encoder alone; None if quire reads none.
    """

    title: str
    model_types: tuple[str, ...]
    read: Callable[[RawConfig, RawConfig, int], ImageSpec]
    projector: Projector | None = None


def read_levels(processor: RawConfig) -> PixelLevels:
    """Read the steps of preprocessor_config.json that all families share. Raises ConfigError,
    naming the file and the key, for steps that are left out, and for impossible values."""
    for step in STEPS:
        processor.reject(step, value=False, advice="images are always prepared in all steps")
    resample = processor.read(int, "resample")
    if resample not in _RESAMPLING:
        raise processor.unsupported("resample", resample, [str(i) for i in _RESAMPLING])
    levels = PixelLevels(
        resample=resample,
        factor=processor.read(float, "rescale_factor"),
        mean=_of_channels(processor, "image_mean"),
        std=_of_channels(processor, "image_std"),
    )
    for mean, std in zip(levels.mean, levels.std, strict=True):
        ends = [(level * levels.factor - mean) / std for level in (0, 255)]
        if not all(abs(end) <= _LARGEST_LEVEL for end in ends):  # NaN is not either
            raise ConfigError(
                f"{processor.source}: rescale_factor={levels.factor}, image_mean={mean} and "
                f"image_std={std} make numbers from {ends[0]:g} to {ends[1]:g} of pixels; take the "
                "published file"
            )
    return levels


def _of_channels(processor: RawConfig, key: str) -> tuple[float, ...]:
    found = processor.read_list(float, key) or ()
    if len(found) != NUM_CHANNELS or (key == "image_std" and not all(found)):
        raise ConfigError(
            f"{processor.source}: {key}={list(found)} is not supported; give {NUM_CHANNELS} "
            "numbers, and none that is 0 in image_std"
        )
    return found
