"""Values of preprocessor_config.json: a choice by `mm_processor_kwargs`, and refusals of numbers
that would make too much of any image, before there are pixels."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_images import write_two_files
from tests.image_writer import PATCH, SCALE, TILE, write_any_checkpoint

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.media.gemma3 import PanAndScan
from quire.config.media.images import MOST_PIXELS, MOST_TILES, find_images
from quire.config.settings import EngineSettings
from quire.config.startup import find_model

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
KINDS = ("smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3")
HUGE = 1 << 40
CROPS = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 10**9}
SMALLEST = PATCH * SCALE
"""Pixels of the side of a tile that is one token."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sizes")
    return {kind: write_any_checkpoint(base / kind, kind) for kind in KINDS}


def change(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Write values into a JSON file, also into its objects."""
    read: dict[str, Any] = json.loads((folder / name).read_text())
    for key, value in values.items():
        read[key] = {**read[key], **value} if isinstance(value, dict) else value
    (folder / name).write_text(json.dumps(read))


def tile(side: int) -> dict[str, dict[str, Any]]:
    """Values of both files for tiles of so many pixels."""
    return {
        CONFIG: {"vision_config": {"image_size": side}},
        PROCESSOR: {"size": {"longest_edge": 1 << 20}, "max_image_size": {"longest_edge": side}},
    }


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        ("qwen2_5_vl", {PROCESSOR: {"min_pixels": HUGE, "max_pixels": HUGE}}, "min_pixels"),
        (
            "qwen3_vl",
            {PROCESSOR: {"size": {"shortest_edge": HUGE, "longest_edge": HUGE}}},
            r"1 tiles of 1,099,\d{3},\d{3},\d{3} pixels in all.*shortest_edge",
        ),
        ("gemma3", {PROCESSOR: CROPS}, "1,000,000,001 tiles of .*pan_and_scan_max_num_crops"),
        ("smolvlm", tile(TILE << 20), r"1 tiles of 862,\d{3},\d{3},\d{3},\d{3} pixels"),
        ("smolvlm", tile(SMALLEST), r"85,850 tiles of .*max_image_size"),
        ("smolvlm", {PROCESSOR: {"rescale_factor": 1e300}}, "make numbers from .* to 5.1e.302"),
        ("gemma3", {PROCESSOR: {"image_std": [0.5, 1e-320, 0.5]}}, "make numbers from -inf to inf"),
        ("qwen3_vl", {PROCESSOR: {"image_mean": [0.5, 1e9, 0.5]}}, "image_mean=1000000000.0"),
        ("qwen3_vl", {CONFIG: {"image_token_id": 1 << 30}}, "token id 1073741824, but"),
        ("gemma3", {CONFIG: {"eoi_token_index": -1}}, "token id -1, but the language model has"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_files_of_a_folder(
    kind: str, files: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[kind], tmp_path / "model"))
    settings = EngineSettings(model=str(folder))
    assert find_images(folder, read_model_spec(folder), settings) is not None
    for name, values in files.items():
        change(folder, name, values)
    with pytest.raises(ConfigError, match=words) as caught:
        find_images(folder, read_model_spec(folder), settings)
    assert str(folder) in str(caught.value)


def test_an_image_encoder_in_gguf(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was not named leaves the model as one of text alone."""
    most = (1 << 32) - 1  # what the file holds
    bounds: dict[str, Any] = {"vision.image_min_pixels": most, "vision.image_max_pixels": most}
    model, file = write_two_files(folders["qwen3_vl"], tmp_path, **bounds)
    with pytest.raises(ConfigError, match=r"pixels in all.*image_min_pixels") as caught:
        find_model(EngineSettings(model=str(model), mmproj=str(file)))
    assert str(file) in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find_model(EngineSettings(model=str(model))).spec.images is None
    assert "takes no images" in caplog.text and "image_min_pixels" in caplog.text


def test_most_made_is_a_bound(folders: dict[str, Path]) -> None:
    """Images of any ratio become no more than the files tell."""
    for kind, folder in folders.items():
        spec: Any = find_images(folder, read_model_spec(folder), EngineSettings(model=str(folder)))
        tiles, pixels = spec.most_made
        assert tiles <= MOST_TILES and pixels <= MOST_PIXELS
        for width, height in ((1, 1), (1, 200), (200, 1), (3, 599), (40, 41), (7, 900)):
            if kind == "smolvlm":
                made = spec.num_tiles(width, height)
                assert made <= tiles and made * spec.tower.tile_size**2 <= pixels
            elif kind != "gemma3":
                wide, high = spec.resized(width, height)
                assert wide * high <= max(pixels, width * height)


def chosen(folder: Path, values: dict[str, Any], **more: Any) -> Any:
    options = {"model": str(folder), "mm_processor_kwargs": values, **more}
    return find_model(EngineSettings.from_options(options)).spec.images


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma3", {"do_pan_and_scan": True}),
        ("gemma3", {**CROPS, "pan_and_scan_max_num_crops": 2, "do_convert_rgb": True}),
        ("smolvlm", {"size": {"longest_edge": 2 * TILE}, "do_image_splitting": True}),
        ("qwen2_5_vl", {"min_pixels": 1000, "max_pixels": 2000, "fps": 1}),
        ("qwen3_vl", {"size": {"shortest_edge": 1000, "longest_edge": 2000}}),
    ],
    ids=str,
)
def test_chosen_values_are_those_of_a_file(
    kind: str, values: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The first keys are those of vLLM's examples."""
    folder = Path(shutil.copytree(folders[kind], tmp_path / "model"))
    found, published = chosen(folder, values), chosen(folder, {})
    change(folder, PROCESSOR, values)
    assert found == chosen(folder, {}) != published


def test_chosen_values_for_an_image_encoder_in_gguf(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, _ = write_two_files(folders["gemma3"], tmp_path)
    assert chosen(model, {"do_pan_and_scan": True}).crops == PanAndScan(256, 4, 1.2)
    assert chosen(model, {}).crops is None


@pytest.mark.parametrize(
    ("kind", "values", "more", "words"),
    [
        ("gemma3", {"do_pan_and_scann": True}, {}, "has 'do_pan_and_scann', which images of Gemma"),
        ("smolvlm", {"do_pan_and_scan": True}, {}, "has 'do_pan_and_scan', which images of Smol"),
        ("gemma3", {"do_pan_and_scan": 1}, {}, "with mm_processor_kwargs: do_pan_and_scan=1 must"),
        ("gemma3", CROPS, {}, "with mm_processor_kwargs: an image could become 1,000,000,001"),
        ("gemma3", {"do_resize": False}, {}, "with mm_processor_kwargs: do_resize=False"),
        ("gemma3", {"fps": 1}, {"limit_mm_per_prompt": {"image": 0}}, "takes none here"),
        ("gemma3", [1], {}, "an object such as"),
    ],
    ids=str,
)
def test_chosen_values_that_are_refused(
    kind: str, values: Any, more: dict[str, Any], words: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(folders[kind], values, **more)
    with pytest.raises(ConfigError, match="takes none here"):
        chosen(bundled_model_path(), {"do_pan_and_scan": True})
