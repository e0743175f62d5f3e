"""Images of Qwen2.5-VL, Qwen3-VL and Qwen3.5: pixels, numbers of tokens and positions equal those
of transformers, and so do rows of the encoders."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.image_oracle import GREEDY, inputs_of, oracle
from tests.image_writer import (
    QWEN_IMAGE,
    QWEN_PROCESSOR,
    data_url,
    picture,
    write_qwen_checkpoint,
)
from tests.profiles import examples, scaled

from quire import LLM
from quire.base.errors import ConfigError, RequestError
from quire.base.platform import detect_platform
from quire.compute.layers import LayerFactory
from quire.compute.models.loader import load_tower
from quire.compute.models.towers.qwen_vl import QwenTower
from quire.compute.runner.rows import RowTable
from quire.config import read_checkpoint
from quire.config.families.reader import read_model_spec
from quire.config.hf import RawConfig
from quire.config.media.images import find_images
from quire.config.media.qwen_vl import QwenSpec, read_qwen2_5, read_qwen3
from quire.config.model_spec import ModelSpec
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import load_model_front
from quire.ops.registry import build_op_set
from quire.protocol.media import MediaInfo
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import EnterRow, StepPlan
from quire.text.rendering.media.qwen_vl import QwenPreparer

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
SIZES = st.tuples(st.integers(1, 300), st.integers(1, 300)).filter(
    lambda size: max(size) <= 200 * min(size)
)
VISION = {
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "depth": 2,
    "deepstack_visual_indexes": [],
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
    "Qwen3-VL": {
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    },
}
"""preprocessor_config.json of published checkpoints, as far as it differs."""


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def processor_of(**processor: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    return Qwen2VLImageProcessorPil(**copy.deepcopy(processor))  # it writes into dictionaries


def spec_of(vision: dict[str, Any] | None = None, **processor: Any) -> QwenSpec:
    given = {**QWEN_PROCESSOR, **processor}
    size = given["patch_size"]
    sides = {**VISION, "patch_size": size, "window_size": 4 * size, **(vision or {})}
    config = {"vision_config": sides, "image_token_id": 9}
    return read_qwen2_5(RawConfig(config, "config.json"), RawConfig(given, "processor"), 32)


def pixels_of(spec: QwenSpec, image: Any) -> np.ndarray:
    """Patches [P, 3 · frames · patch²]."""
    tiles = QwenPreparer(spec, None)(image, is_low=False).data  # type: ignore[arg-type]
    tower: Any = QwenTower.__new__(QwenTower)
    tower._images, tower._spec = spec, spec.tower
    levels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
    return tower._cut(levels.view(1, tiles.height, tiles.width, 3)).numpy()


@given(size=SIZES, seed=st.integers(0, 99))
@examples(100)
def test_pixels_are_those_of_transformers(size: tuple[int, int], seed: int) -> None:
    image = picture(*size, seed=seed)
    wanted = processor_of(**QWEN_PROCESSOR)([image], return_tensors="np")
    assert np.array_equal(pixels_of(spec_of(), image), wanted["pixel_values"])


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("size", [(640, 480), (200, 900)])
def test_pixels_for_published_sizes(model: str, size: tuple[int, int]) -> None:
    given = {**QWEN_PROCESSOR, **PUBLISHED[model]}
    if "min_pixels" in given:  # older files have no size
        del given["size"]
    image = picture(*size)
    wanted = processor_of(**given)([image], return_tensors="np")["pixel_values"]
    spec = spec_of(**{**given, "size": given.get("size")})
    assert np.array_equal(pixels_of(spec, image), wanted)


@pytest.mark.parametrize("model", [*PUBLISHED, "tiny"])
def test_numbers_of_tokens_of_1000_sizes_are_those_of_transformers(model: str) -> None:
    given = {**QWEN_PROCESSOR, **PUBLISHED.get(model, {})}
    if "min_pixels" in given:
        del given["size"]
    spec = spec_of(**{**given, "size": given.get("size")})
    processor, random = processor_of(**given), np.random.default_rng(3)
    for _ in range(scaled(1000)):
        width, height = (int(i) for i in np.exp(random.uniform(0, 8.5, 2)).astype(int) + 1)
        try:
            wanted = processor.get_number_of_image_patches(height, width) // 4
        except ValueError:
            with pytest.raises(RequestError, match="at most 200 times the other"):
                spec.resized(width, height)
            continue
        assert spec.num_rows(1, *spec.resized(width, height)) == wanted, (width, height)


def test_published_examples_have_their_known_number_of_tokens() -> None:
    two, three = (
        spec_of(**{**PUBLISHED[name], "size": size})
        for name, size in (
            ("Qwen2.5-VL", {"shortest_edge": 3136, "longest_edge": 12845056}),
            ("Qwen3-VL", PUBLISHED["Qwen3-VL"]["size"]),
        )
    )
    sizes = ((640, 480), (896, 896), (100, 1000))
    assert [two.num_rows(1, *two.resized(*size)) for size in sizes] == [391, 1024, 144]
    assert [three.num_rows(1, *three.resized(*size)) for size in sizes] == [300, 784, 93]
    low = two.num_rows(1, *two.resized(4000, 3000, is_low=True))
    assert 200 < low <= 256


def test_bounds_of_a_file_with_both_names_are_those_of_transformers() -> None:
    both = {**QWEN_PROCESSOR, "min_pixels": 1000, "max_pixels": 2000}
    spec, processor = spec_of(**both), processor_of(**both)
    assert spec.min_pixels == processor.size.shortest_edge
    assert spec.max_pixels == processor.size.longest_edge


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    texts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
@examples(25)
def test_positions_are_those_of_transformers(
    positions_folder: Path, sizes: list[tuple[int, int]], texts: list[int]
) -> None:
    """Text, images and text, and the positions of tokens that follow."""
    images = [picture(*size) for size in sizes]
    text = "".join("word " * count + QWEN_IMAGE for count, _ in zip(texts, images, strict=False))
    prompt = front_of(positions_folder).renderer.render_prompt(
        {"prompt": text + "word " * texts[-1], "multi_modal_data": {"image": images}}
    )
    model, _ = oracle(positions_folder)
    inputs = inputs_of(positions_folder, prompt.token_ids, images)
    wanted, delta = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    spans = tuple(
        each.span
        for part in prompt.parts
        for each in part.placed(MediaInfo(sum(r.tokens.length for r in part.runs), b""), 0).media  # type: ignore[attr-defined]
    )
    length = len(prompt.token_ids)
    rows = RowTable(1, 4096, [16], position_axes=3)
    ids = np.array(prompt.token_ids, np.int32)
    tables = (np.zeros(0, np.int32),)
    enter = EnterRow(0, ids, length, 0, tables, SamplingParams(), 0, 0, media=spans)
    rows.apply(StepPlan(0, enter=(enter,)))
    rows.standing[0] = length
    found = rows.positions_on_axes(rows.scheduled())
    assert found is not None
    assert np.array_equal(found, wanted[:, 0].numpy())
    assert rows.position_offset[0] == int(delta)


def test_low_detail_takes_few_tokens(positions_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "larger"
    shutil.copytree(positions_folder, folder)
    size = {"shortest_edge": 256, "longest_edge": 400 * 64}
    processor = {**QWEN_PROCESSOR, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    front, counts = front_of(folder), list[int]()
    for detail in ("high", "low"):
        url = {"url": data_url(picture(300, 300)), "detail": detail}
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
        taken, images = front.renderer.take_images(messages)
        prompt = front.renderer.render_chat(taken, images=images)
        counts.append(sum(run.tokens.length for part in prompt.parts for run in part.runs))
    assert counts == [400, 256]


@pytest.fixture(scope="module")
def positions_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_checkpoint(tmp_path_factory.mktemp("positions"), "qwen2_5_vl")


def spec_in(folder: Path) -> ModelSpec:
    return find_model(EngineSettings(model=str(folder), dtype="float32")).spec


def front_of(folder: Path) -> Any:
    return load_model_front(EngineSettings(model=str(folder)), folder, spec_in(folder))


def encoded(folder: Path, image: Any, dtype: str = "float32") -> torch.Tensor:
    """Rows of an image, by a tower without an engine."""
    spec = find_model(EngineSettings(model=str(folder), dtype=dtype)).spec
    spec = replace(spec, dtype=dtype)
    assert isinstance(spec.images, QwenSpec)
    tiles = QwenPreparer(spec.images, None)(image, is_low=False).data  # type: ignore[arg-type]
    ops = build_op_set(detect_platform(), {})
    numbers = getattr(torch, dtype)
    make = LayerFactory(ops, {}, numbers, torch.device("cpu"), max_positions=0)
    with torch.inference_mode():
        tower = load_tower(spec, folder, make)
        assert tower is not None
        levels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
        rows = tower.encode(levels.view(1, tiles.height, tiles.width, 3), numbers)
    assert len(rows) == spec.images.num_rows(1, tiles.width, tiles.height)
    return rows


@pytest.mark.parametrize("size", [(64, 64), (60, 30), (16, 160), (8, 8), (200, 24), (37, 91)])
def test_rows_of_the_tower_are_those_of_transformers(folder: Path, size: tuple[int, int]) -> None:
    """Windows that are cut at edges, and tables smaller and larger than the image."""
    image = picture(*size)
    rows = encoded(folder, image)
    model, processor = oracle(folder)
    with torch.inference_mode():
        found = model.get_image_features(**processor([[image]], return_tensors="pt"))
    deep = getattr(found, "deepstack_features", None) or ()
    wanted = [torch.cat(list(each)) for each in (found.pooler_output, *deep)]
    assert rows.shape[1] == 32 * len(wanted)
    for own, theirs in zip(rows.split(32, dim=1), wanted, strict=True):
        assert float((own - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_rows_in_16_bits_point_the_same_way(folder: Path) -> None:
    image = picture(60, 40)
    whole, half = encoded(folder, image), encoded(folder, image, "bfloat16").float()
    cosines = torch.nn.functional.cosine_similarity(whole, half, dim=1)
    assert float(cosines.min()) >= 0.999


def test_sizes_count_as_many_parameters_as_the_files_have(folder: Path) -> None:
    images = spec_in(folder).images
    assert images is not None
    stored = sum(each.num_elements for each in read_checkpoint(folder).others.values())
    assert images.num_parameters == stored


def test_published_files_of_qwen2_5_are_flat(tmp_path: Path) -> None:
    """Values of the text model beside the encoder's. transformers writes the names of tensors that
    published files have; others have those of its modules."""
    folder = write_qwen_checkpoint(tmp_path / "nested", "qwen2_5_vl")
    flat = tmp_path / "flat"
    shutil.copytree(folder, flat)
    config = json.loads((flat / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": "mrope"}}
    text["rope_scaling"].pop("rope_type")
    (flat / "config.json").write_text(json.dumps({**text, **config}))
    tensors = load_file(folder / "model.safetensors")
    assert {"visual.merger.ln_q.weight", "model.norm.weight"} <= set(tensors)
    names = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
    renamed = {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        for old, new in names.items()
        if name.startswith(old)
    }
    save_file(renamed, flat / "model.safetensors", metadata={"format": "pt"})
    assert spec_in(flat) == spec_in(folder)
    found, wanted = read_checkpoint(flat), read_checkpoint(folder)
    assert set(found.tensors) == set(wanted.tensors)
    assert set(found.others) == {f"model.{name}" for name in wanted.others}
    prompt: Any = {"prompt": QWEN_IMAGE, "multi_modal_data": {"image": picture(40, 30)}}
    answers = []
    for each in (flat, folder):
        with LLM(str(each), dtype="float32", quiet=True, num_kv_blocks=32) as llm:
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("vision", "processor", "words"),
    [
        ({}, {"do_resize": False}, "do_resize=False is not supported"),
        ({}, {"merge_size": 3}, "merge_size=3 does not fit an encoder with 2"),
        ({}, {"temporal_patch_size": 1}, "temporal_patch_size=1 does not fit"),
        ({}, {"size": {"shortest_edge": 9, "longest_edge": 8}}, "leave no size for an image"),
        ({"hidden_size": 20}, {}, "no heads of a multiple of 4"),
        ({"window_size": 12}, {}, "window_size=12 is not a multiple of the 8 pixels"),
        ({"out_hidden_size": 48}, {}, "out_hidden_size=48 does not fit a language model of 32"),
        ({"in_channels": 4}, {}, "in_channels=4"),
    ],
    ids=str,
)
def test_what_is_not_prepared_so_is_refused(
    vision: dict[str, Any], processor: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(vision, **processor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_position_embeddings": 15}, "num_position_embeddings=15 is no square"),
        ({"deepstack_visual_indexes": [0, 2]}, "must be different layers from 0 to 1"),
        ({"deepstack_visual_indexes": [1, 1]}, "must be different layers"),
    ],
    ids=str,
)
def test_what_qwen3_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    config = {"vision_config": {**VISION, **change}}
    with pytest.raises(ConfigError, match=words):
        read_qwen3(
            RawConfig(config, "config.json"), RawConfig(dict(QWEN_PROCESSOR), "processor"), 32
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_theta_that_the_file_leaves_out_is_that_of_transformers(
    kind: str, form: str, tmp_path: Path
) -> None:
    """Fault: positions turn by the theta of other families."""
    from transformers import AutoConfig

    folder = write_qwen_checkpoint(tmp_path / "model", kind)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    for values in (config, text, text["rope_parameters"]):
        values.pop("rope_theta", None)
    if form == "flat":
        text["rope_scaling"] = {**text.pop("rope_parameters"), "type": "default"}
        if kind == "qwen2_5_vl":  # as published
            config = {**config.pop("text_config"), **config}
    path.write_text(json.dumps(config))
    wanted = AutoConfig.from_pretrained(folder).get_text_config().rope_parameters["rope_theta"]
    assert {rope.theta for rope in read_model_spec(folder).ropes if rope is not None} == {wanted}


def test_a_language_model_that_cannot_take_the_rows_is_refused(tmp_path: Path) -> None:
    folder = write_qwen_checkpoint(tmp_path / "model", "qwen3_vl")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for change, words in (
        ({"num_hidden_layers": 2}, "2 layers of deepstack_visual_indexes are too many"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "has no mrope_section"),
    ):
        changed = {**config, "text_config": {**config["text_config"], **change}}
        path.write_text(json.dumps(changed))
        spec = read_model_spec(folder)
        with pytest.raises(ConfigError, match=words):
            find_images(folder, spec, EngineSettings(model=str(folder)))
