"""Tiles and their number equal those of transformers' PIL classes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.image_writer import PROCESSOR, picture
from tests.profiles import examples, scaled

from quire.base.errors import ConfigError
from quire.compute.models.towers.tower import normalised
from quire.config.hf import RawConfig
from quire.config.media.idefics3 import IdeficsSpec, read_images
from quire.text.rendering.media.idefics3 import make_tiles

SHAPES = {"SmolVLM-256M": (512, 2048, 16, 4), "Idefics3-8B": (364, 1456, 14, 2)}
"""Tile, longest edge, patch and scale of published checkpoints."""
VISION = {"hidden_size": 24, "num_attention_heads": 2}
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400))


def spec_of(
    tile: int = 28, longest: int = 84, patch: int = 7, scale: int = 2, **processor: Any
) -> IdeficsSpec:
    vision = {**VISION, "image_size": tile, "patch_size": patch}
    config = {"vision_config": vision, "scale_factor": scale, "image_token_id": 9}
    given = {**PROCESSOR, "size": {"longest_edge": longest}}
    given |= {"max_image_size": {"longest_edge": tile}, **processor}
    return read_images(RawConfig(config, "config.json"), RawConfig(given, "processor"), 32)


def of_transformers(spec: IdeficsSpec, image: Any, *, splits: bool = True) -> np.ndarray:
    """Pixels [tiles, 3, S, S]."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    processor = Idefics3ImageProcessorPil(
        **{
            **PROCESSOR,
            "size": {"longest_edge": spec.longest_edge},
            "max_image_size": {"longest_edge": spec.tower.tile_size},
            "do_image_splitting": splits,
            "resample": spec.levels.resample,
            "image_mean": spec.levels.mean,
            "image_std": spec.levels.std,
        }
    )
    return np.asarray(processor([[image]], return_tensors="np")["pixel_values"])[0]


def pixels_of(spec: IdeficsSpec, image: Any, *, splits: bool = True) -> np.ndarray:
    tiles = make_tiles(spec, image, splits=splits)
    assert tiles.num_tiles == spec.num_tiles(*image.size, splits=splits)
    levels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
    return normalised(spec.levels, levels.view(-1, tiles.height, tiles.width, 3)).numpy()


@given(size=SIZES, seed=st.integers(0, 99), splits=st.booleans())
@examples(30)
def test_pixels_are_those_of_transformers(size: tuple[int, int], seed: int, splits: bool) -> None:
    spec, image = spec_of(), picture(*size, seed=seed)
    found, wanted = (f(spec, image, splits=splits) for f in (pixels_of, of_transformers))
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [(640, 480), (200, 1000)])
def test_pixels_for_published_sizes(shape: str, size: tuple[int, int]) -> None:
    spec, image = spec_of(*SHAPES[shape]), picture(*size)
    assert np.array_equal(pixels_of(spec, image), of_transformers(spec, image))


@pytest.mark.parametrize(
    "processor",
    [
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"resample": 3},
    ],
    ids=str,
)
def test_values_of_the_processor_count(processor: dict[str, Any]) -> None:
    spec, image = spec_of(**processor), picture(90, 61)
    assert np.array_equal(pixels_of(spec, image), of_transformers(spec, image))


def test_numbers_of_tiles_of_1000_sizes_are_those_of_transformers() -> None:
    """`get_number_of_image_patches` there rounds otherwise than the processor: the tiles count."""
    from PIL import Image

    spec, random = spec_of(14, 56), np.random.default_rng(3)
    for _ in range(scaled(1000)):
        width, height = (int(i) for i in np.exp(random.uniform(0, 6.2, 2)).astype(int) + 1)
        wanted = len(of_transformers(spec, Image.new("RGB", (width, height))))
        assert spec.num_tiles(width, height) == wanted, (width, height)


def test_published_examples_have_their_known_number_of_tokens() -> None:
    """640 x 480 and 1920 x 1080 take 12 tiles and the whole in SmolVLM."""
    spec = spec_of(512, 2048, 16, 4)
    assert spec.tokens_per_tile == 64
    assert [spec.num_tiles(*size) for size in ((640, 480), (896, 896), (1920, 1080))] == [
        13,
        17,
        13,
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"do_resize": False}, "do_resize=False is not supported"),
        ({"resample": 9}, "resample=9"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"max_image_size": {"longest_edge": 364}}, "tiles of 364 pixels do not fit"),
    ],
    ids=str,
)
def test_what_is_not_prepared_so_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(**change)


def test_sizes_count_as_many_parameters_as_the_files_have(tmp_path: Path) -> None:
    from tests.image_writer import write_vision_checkpoint

    from quire.config import read_checkpoint
    from quire.config.families.reader import read_model_spec
    from quire.config.media.images import find_images
    from quire.config.settings import EngineSettings

    folder = write_vision_checkpoint(tmp_path / "model")
    spec = read_model_spec(folder)
    images = find_images(folder, spec, EngineSettings(model=str(folder)))
    assert images is not None
    stored = sum(each.num_elements for each in read_checkpoint(folder).others.values())
    assert images.num_parameters == stored
