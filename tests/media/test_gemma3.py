"""Images of Gemma 3, beyond the laws of all families: pixels, tokens and rows are those of
transformers, and tokens of an image see each other whatever a step holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.image_oracle import (
    GREEDY,
    SETTINGS,
    asked,
    generated,
    oracle,
    tokens,
    worker_of,
)
from tests.image_writer import (
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_PROCESSOR,
    GEMMA_SIDE,
    GEMMA_SOFT,
    GEMMA_TOKENS,
    picture,
    write_gemma_checkpoint,
)
from tests.profiles import examples, scaled

from quire import LLM, BeamSearchParams, SamplingParams
from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.compute.models.towers.tower import normalised
from quire.config import read_checkpoint
from quire.config.families.reader import read_model_spec
from quire.config.hf import RawConfig
from quire.config.media.gemma3 import Gemma3ImageSpec, read_images
from quire.config.media.images import find_images
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.text.rendering.media.gemma3 import Gemma3Preparer

IMAGE = GEMMA_BEGIN
EXPANDED = f"\n\n{GEMMA_BEGIN}{GEMMA_SOFT * GEMMA_TOKENS}{GEMMA_END}\n\n"
LONGER = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400))
TEXTS = (
    IMAGE,
    f"See {IMAGE} now",
    f"user\n{IMAGE}What?",
    f"a\n\n\n{IMAGE}\nb\n\n",
    f"{IMAGE}{IMAGE}",
)
"""Prompts with images at their ends, beside line ends, and beside each other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_checkpoint(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


def spec_of(side: int = GEMMA_SIDE, config: Any = (), **processor: Any) -> Gemma3ImageSpec:
    vision = {"hidden_size": 24, "num_attention_heads": 2, "image_size": side, "patch_size": 4}
    given = {"vision_config": vision, "mm_tokens_per_image": GEMMA_TOKENS, **dict(config)}
    size = {"height": side, "width": side}
    read = RawConfig({**GEMMA_PROCESSOR, "size": size, **processor}, "processor")
    return read_images(RawConfig(given, "config.json"), read, 32)


def prepared(
    spec: Gemma3ImageSpec, image: Any, *, is_low: bool = False, tokenizer: Any = None
) -> Any:
    return Gemma3Preparer(spec, tokenizer)(image, is_low=is_low)


def pixels_of(spec: Gemma3ImageSpec, image: Any, tokenizer: Any = None) -> np.ndarray:
    """tokenizer: needed by images with crops."""
    tiles = prepared(spec, image, tokenizer=tokenizer).data
    levels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
    shape = (tiles.num_tiles, tiles.height, tiles.width, 3)
    return normalised(spec.levels, levels.view(shape)).numpy()


def of_transformers(side: int, image: Any, **more: Any) -> np.ndarray:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    given: dict[str, Any] = {**GEMMA_PROCESSOR, "size": {"height": side, "width": side}, **more}
    processor = Gemma3ImageProcessorPil(**given)
    return np.asarray(processor([image], return_tensors="np")["pixel_values"])


@given(size=SIZES, seed=st.integers(0, 99))
@examples(100)
def test_pixels_are_those_of_transformers(size: tuple[int, int], seed: int) -> None:
    image = picture(*size, seed=seed)
    assert np.array_equal(pixels_of(spec_of(), image), of_transformers(GEMMA_SIDE, image))


@pytest.mark.parametrize("size", [(640, 480), (896, 896), (200, 1000)])
def test_pixels_for_the_published_size(size: tuple[int, int]) -> None:
    image = picture(*size)
    assert np.array_equal(pixels_of(spec_of(896), image), of_transformers(896, image))


def test_numbers_of_tokens_of_1000_sizes_are_those_of_transformers() -> None:
    from PIL import Image
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    spec, random = spec_of(), np.random.default_rng(3)
    there: Any = SimpleNamespace(image_seq_length=GEMMA_TOKENS)
    for _ in range(scaled(1000)):
        width, height = (int(i) for i in np.exp(random.uniform(0, 6.2, 2)).astype(int) + 1)
        for is_low in (False, True):
            found = prepared(spec, Image.new("RGB", (width, height)), is_low=is_low)
            tiles = found.data
            num_rows = spec.num_rows(tiles.num_tiles, tiles.width, tiles.height)
            assert sum(run.length for run in found.runs) == num_rows
            told = Gemma3Processor._get_num_multimodal_tokens(there, [(height, width)])
            assert [num_rows] == told["num_image_tokens"]


def test_the_published_sizes_give_256_tokens() -> None:
    vision = {"image_size": 896, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16}
    spec = spec_of(896, {"vision_config": vision, "mm_tokens_per_image": 256})
    assert (spec.whole_tokens, spec.pool) == (256, 4)
    assert (spec.token_id, spec.begin_id, spec.end_id) == (262144, 255999, 256000)


def test_sizes_count_as_many_parameters_as_the_files_have(folder: Path) -> None:
    images = find_images(folder, read_model_spec(folder), EngineSettings(model=str(folder)))
    assert images is not None
    stored = sum(each.num_elements for each in read_checkpoint(folder).others.values())
    assert images.num_parameters == stored


def test_rows_of_the_tower_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    model, processor = oracle(folder)
    worker, image = worker_of(llm), picture(100, 70)
    tiles = prepared(worker._loaded.spec.images, image).data
    rows = worker._images.encode(tiles, torch.float32).rows
    with torch.inference_mode():
        pixels = processor([image], return_tensors="pt")["pixel_values"]
        wanted = model.get_image_features(pixel_values=pixels).pooler_output[0]
    assert rows.shape == wanted.shape
    assert float((rows - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        f"\n{IMAGE}\n\n\n{IMAGE}\n",
        f"one\n{IMAGE}two {IMAGE}{IMAGE}\n\n\n\nthree\n\n",
    ],
)
def test_prompts_have_the_token_ids_of_transformers(llm: LLM, folder: Path, text: str) -> None:
    """The processor there writes the tokens as text, so that line ends around images join."""
    from transformers import AutoTokenizer

    images = [picture(30, 20, seed=i) for i in range(text.count(IMAGE))]
    found = llm.engine.renderer.render_prompt(asked(text, *images))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert found.token_ids == tokenizer(text.replace(IMAGE, EXPANDED))["input_ids"]
    soft = tokenizer.convert_tokens_to_ids(GEMMA_SOFT)
    parts: Any = found.parts
    for part in parts:
        (run,) = part.runs
        own = found.token_ids[run.position - 1 : run.position + run.tokens.length + 1]
        assert own[1:-1] == [soft] * GEMMA_TOKENS and soft not in (own[0], own[-1])


@pytest.mark.parametrize("window", [8, 16, 40])
def test_answers_with_another_window(tmp_path: Path, window: int) -> None:
    folder = write_gemma_checkpoint(tmp_path / "model", sliding_window=window)
    image, words = picture(60, 30), "some words before and behind " * 3
    with LLM(str(folder), **SETTINGS) as llm:
        (found,) = llm.generate(asked(f"{words}{IMAGE}{words}", image), GREEDY, use_tqdm=False)
    assert tokens(found) == generated(folder, list(found.prompt_token_ids), [image])


def test_images_beside_many_streams_in_the_smallest_steps(folder: Path, llm: LLM) -> None:
    """An image waits for a step with room for all of it, and streams go on."""
    prompts: list[Any] = [
        "Only text.",
        *(asked(f"{i} {IMAGE}?", picture(9, 9, i)) for i in range(5)),
    ]
    wanted = [tokens(each) for each in llm.generate(prompts, LONGER, use_tqdm=False)]
    small = {"max_num_seqs": 4, "max_num_batched_tokens": GEMMA_TOKENS + 3}
    with LLM(str(folder), **SETTINGS, **small) as engine:
        assert [tokens(e) for e in engine.generate(prompts, LONGER, use_tqdm=False)] == wanted


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_hit_that_ends_within_an_image_is_cold(folder: Path, block_size: int) -> None:
    """K/V of an image's first tokens saw all of it when they were computed, so the others may be
    computed alone."""
    image, ends_within = picture(48, 80, seed=7), 0
    settings = {**SETTINGS, "block_size": block_size, "max_model_len": 128}
    with LLM(str(folder), **settings) as llm:
        for number in range(8):
            words = "x" * number
            llm.generate(asked(f"{words}{IMAGE}", image), GREEDY, use_tqdm=False)
            again = asked(f"{words}{IMAGE} Where?", image)
            (hit,) = llm.generate(again, GREEDY, use_tqdm=False)
            ids = list(hit.prompt_token_ids)
            soft = worker_of(llm)._loaded.spec.images.token_id
            first = ids.index(soft)
            ends_within += first < hit.num_cached_tokens < first + GEMMA_TOKENS
            assert tokens(hit) == generated(folder, ids, [image])
            llm.reset_prefix_cache()
    assert ends_within > 1


def test_beams_share_an_image(llm: LLM) -> None:
    """Beams of width 1 are the greedy answer; wider ones begin behind the same image."""
    prompt, image = f"See {IMAGE} now", picture(60, 40)
    greedy = tokens(*llm.generate(asked(prompt, image), GREEDY, use_tqdm=False))
    for width in (1, 3):
        params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)
        (found,) = llm.beam_search([asked(prompt, image)], params)
        answers = [list(each.tokens)[-12:] for each in found.sequences]
        assert len(answers) == width
        assert width > 1 or answers == [greedy]


def test_prompt_embeddings_are_not_scaled(folder: Path) -> None:
    """The factor belongs to the token table, as in transformers; also beside an image."""
    model, _ = oracle(folder)
    ids = torch.tensor([[5, 9, 200, 7, 31, 8]])
    embed, wanted = model.get_input_embeddings(), list[int]()
    with torch.inference_mode():
        rows = embed(ids)
        embeds: Any = {"prompt_embeds": rows[0].clone()}
        for _ in range(12):
            logits = model(inputs_embeds=rows, use_cache=False).logits
            wanted.append(int(logits[0, -1].argmax()))
            rows = torch.cat((rows, embed(torch.tensor([wanted[-1:]]))), dim=1)
    image = asked(f"See {IMAGE} now", picture(60, 40))
    with LLM(str(folder), **SETTINGS, enable_prompt_embeds=True) as engine:
        assert tokens(*engine.generate(embeds, GREEDY, use_tqdm=False)) == wanted
        (alone,) = engine.generate(image, GREEDY, use_tqdm=False)
        found = engine.generate([image, embeds, image], GREEDY, use_tqdm=False)
    assert [tokens(each) for each in found] == [tokens(alone), wanted, tokens(alone)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_batched_tokens": 15}, "less than the 16 tokens of an image"),
        ({"max_num_batched_tokens": 18, "max_num_seqs": 4}, "Give at least 19"),
        ({"long_prefill_token_threshold": 9}, "Give at least 16"),
    ],
    ids=str,
)
def test_steps_must_hold_an_image(folder: Path, settings: dict[str, Any], words: str) -> None:
    asked_for = EngineSettings.from_options({"model": str(folder), **SETTINGS, **settings})
    with pytest.raises(ConfigError, match=words):
        plan_startup(asked_for, detect_platform())


def test_few_tokens_in_a_step_leave_room_for_an_image(folder: Path) -> None:
    asked_for = {"model": str(folder), **SETTINGS, "max_num_batched_tokens": 20}
    resolved = plan_startup(EngineSettings.from_options(asked_for), detect_platform()).resolved
    assert resolved.settings.max_num_seqs <= 5


@pytest.mark.parametrize(
    ("processor", "config", "words"),
    [
        ({"do_pan_and_scan": "yes"}, {}, "do_pan_and_scan='yes' must be of type bool"),
        ({"pan_and_scan_max_num_crops": 0}, {}, "pan_and_scan_max_num_crops=0 must be at least 1"),
        ({"pan_and_scan_min_crop_size": 0}, {}, "pan_and_scan_min_crop_size=0 must be at least 1"),
        ({"pan_and_scan_min_ratio_to_activate": float("nan")}, {}, "must be of type float, and"),
        ({"size": {"height": 32, "width": 64}}, {}, "images of 64 x 32 pixels do not fit"),
        ({}, {"mm_tokens_per_image": 12}, "mm_tokens_per_image=12"),
        ({}, {"mm_tokens_per_image": 9}, "mm_tokens_per_image=9"),
        (
            {},
            {"vision_config": {"hidden_size": 25, "num_attention_heads": 2}},
            "split into 2 heads",
        ),
        ({"do_resize": False}, {}, "do_resize=False is not supported"),
    ],
    ids=str,
)
def test_what_is_not_prepared_so_is_refused(
    processor: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(config=config, **processor)


def test_names_of_published_files(folder: Path, tmp_path: Path, llm: LLM) -> None:
    """Published files have names of two kinds, and `transformers` writes a third one."""
    from safetensors.torch import load_file, save_file

    prompt = asked(f"See {IMAGE} now", picture(60, 40))
    wanted = tokens(*llm.generate(prompt, GREEDY, use_tqdm=False))
    weights = load_file(folder / "model.safetensors")
    for place, prefix, text in (("old", "", "model."), ("new", "model.", "")):
        copy = tmp_path / place
        copy.mkdir()
        for file in folder.iterdir():
            if file.suffix in (".json", ".jinja"):
                (copy / file.name).write_bytes(file.read_bytes())
        parts = {
            "vision_tower.": "vision_tower.vision_model.",
            "language_model.model.": f"language_model.{text}",
        }
        renamed: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            for part, there in parts.items():
                name = name.replace(part, there)
            renamed[prefix + name] = tensor
        assert len(renamed) == len(weights) and renamed.keys() != weights.keys()
        save_file(renamed, copy / "model.safetensors")
        with LLM(str(copy), **SETTINGS) as engine:
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted
