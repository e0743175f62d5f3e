"""Crops of long images in Gemma 3 ("pan and scan"): sizes, pixels, texts and answers are those of
transformers. Its processor takes the settings as arguments alone, quire from the checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.image_oracle import GREEDY, SETTINGS, asked, generated, streamed, tokens, worker_of
from tests.image_writer import (
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_PROCESSOR,
    GEMMA_SIDE,
    GEMMA_SOFT,
    GEMMA_TOKENS,
    data_url,
    picture,
    write_gemma_checkpoint,
)
from tests.media.test_gemma3 import TEXTS, of_transformers, pixels_of, prepared, spec_of
from tests.profiles import examples, scaled

from quire import LLM
from quire.config.media.gemma3 import PanAndScan
from quire.text.rendering.tokenizer import Tokenizer

IMAGE = GEMMA_BEGIN
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
LONG, TALL, SQUARE = (100, 30), (20, 61), (40, 40)
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_checkpoint(tmp_path_factory.mktemp("crops"), processor=CROPS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


@functools.cache
def processor_of_transformers(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    names = {"boi_token": GEMMA_BEGIN, "image_token": GEMMA_SOFT, "eoi_token": GEMMA_END}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=names)
    images = Gemma3ImageProcessorPil(**GEMMA_PROCESSOR)
    return Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_TOKENS)


def crops_of_transformers(crops: PanAndScan, size: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes of the crops there: channels, height and width."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image = np.zeros((1, size[1], size[0]), np.uint8)
    given = (crops.min_size, crops.max_crops, crops.min_ratio)
    return [each.shape for each in Gemma3ImageProcessorPil().pan_and_scan(image, *given)]


def test_crops_of_1000_sizes_are_those_of_transformers() -> None:
    """Also the number of tokens: the worker counts rows as the front counts places."""
    random, numbers = np.random.default_rng(5), set[int]()
    for _ in range(scaled(1000)):
        crops = PanAndScan(
            int(random.integers(5, 300)), int(random.integers(1, 6)), random.uniform(0.5, 3)
        )
        width, height = (int(i) for i in np.exp(random.uniform(0, 8.3, 2)).astype(int) + 1)
        boxes = crops.boxes(width, height)
        wanted = crops_of_transformers(crops, (width, height))
        assert [(1, low - up, right - left) for left, up, right, low in boxes] == wanted
        numbers.add(len(boxes))
    assert numbers >= {0, 1, 2, 3, 4}


def test_an_image_of_few_pixels_has_no_empty_crops() -> None:
    assert PanAndScan(2, 4, 1.2).boxes(9, 2) == [(0, 0, 3, 2), (3, 0, 6, 2), (6, 0, 9, 2)]


@given(size=SIZES, seed=st.integers(0, 99), most=st.integers(1, 5))
@examples(100)
def test_pixels_are_those_of_transformers(size: tuple[int, int], seed: int, most: int) -> None:
    image, more = picture(*size, seed=seed), {**CROPS, "pan_and_scan_max_num_crops": most}
    spec = spec_of(**more)
    wanted = of_transformers(GEMMA_SIDE, image, **more)
    assume(len(wanted) > 1)
    assert np.array_equal(pixels_of(spec, image, bundled()), wanted)


@functools.cache
def bundled() -> Tokenizer:
    from quire.bundled import bundled_model_path

    return Tokenizer.from_folder(bundled_model_path())


@pytest.mark.parametrize("size", [(1920, 1080), (600, 1800), (896, 896)])
def test_pixels_for_the_published_sizes(size: tuple[int, int]) -> None:
    """Published files have null for the settings; these are the defaults of the processor."""
    defaults = {
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    silent = dict.fromkeys(defaults)
    image = picture(*size)
    spec = spec_of(896, do_pan_and_scan=True, **silent)
    wanted = of_transformers(896, image, do_pan_and_scan=True, **defaults)
    assert len(wanted) == {1920: 3, 600: 4, 896: 1}[size[0]]
    assert np.array_equal(pixels_of(spec, image, bundled()), wanted)


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        f"x{IMAGE}{IMAGE}\n\n\n y {IMAGE}z",
        f"The{IMAGE} <b>  {IMAGE}\n \n{IMAGE}",
        f"é{IMAGE}猫 {IMAGE}",
    ],
)
def test_prompts_have_the_token_ids_of_transformers(llm: LLM, folder: Path, text: str) -> None:
    """The text before an image with crops may end within a token of both."""
    count = text.count(IMAGE)
    for sizes in ([LONG] * count, ([SQUARE, LONG, TALL] * count)[:count]):
        images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
        found = llm.engine.renderer.render_prompt(asked(text, *images))
        wanted = processor_of_transformers(folder)(text=text, images=images, **CROPS)
        assert found.token_ids == wanted["input_ids"][0]
        parts: Any = found.parts
        spec, rows = worker_of(llm)._loaded.spec.images, 0
        for part in parts:
            rows += spec.num_rows(part.data.num_tiles, GEMMA_SIDE, GEMMA_SIDE)
            for run in part.runs:
                own = found.token_ids[run.position : run.position + run.tokens.length]
                assert own == [spec.token_id] * GEMMA_TOKENS
        assert rows == found.token_ids.count(spec.token_id)


def test_tokens_that_a_text_would_not_have_stay(llm: LLM) -> None:
    """A prompt of token ids may spell a word letter by letter."""
    renderer, image = llm.engine.renderer, picture(*LONG)
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    begin = tokenizer.encode(IMAGE, add_special_tokens=False)
    letters = [i for sign in "The" for i in tokenizer.encode(sign, add_special_tokens=False)]
    assert len(letters) == 3 != len(tokenizer.encode("The", add_special_tokens=False))
    given = {"prompt_token_ids": [*letters, *begin], "multi_modal_data": {"image": image}}
    alone = {"prompt_token_ids": begin, "multi_modal_data": {"image": image}}
    assert renderer.render_prompt(given).token_ids == [
        *letters,
        *renderer.render_prompt(alone).token_ids,
    ]


def test_a_text_that_spells_the_tokens_stays_a_text(llm: LLM) -> None:
    """The text before an image is tokenized again, which makes no tokens of images of it."""
    part = {"type": "image_url", "image_url": {"url": data_url(picture(*LONG))}}
    spec = worker_of(llm)._loaded.spec.images
    counts: list[list[int]] = []
    for words in ("some words", f"{GEMMA_BEGIN}{GEMMA_SOFT} words{GEMMA_END}"):
        content = [{"type": "text", "text": words}, part]
        (found,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        ids = list(found.prompt_token_ids)
        counts.append([ids.count(each) for each in spec.own_ids])
    assert counts[0] == counts[1] == [4 * GEMMA_TOKENS, 4, 4]


def test_answers_are_those_of_generate(llm: LLM, folder: Path) -> None:
    """Alone and side by side, in one piece and in the smallest steps, and streamed."""
    cases = [
        (f"See {IMAGE} now", [picture(*LONG)]),
        (f"{IMAGE}A{IMAGE}?", [picture(*TALL), picture(*SQUARE)]),
        (f"{IMAGE}A{IMAGE}?", [picture(*LONG), picture(*TALL)]),
    ]
    prompts = [asked(text, *images) for text, images in cases]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    wanted = [
        generated(folder, list(found.prompt_token_ids), images)
        for found, (_, images) in zip(alone, cases, strict=True)
    ]
    assert [tokens(found) for found in alone] == wanted
    llm.reset_prefix_cache()
    both = llm.generate([*prompts, "Only text."], GREEDY, use_tqdm=False)
    assert [tokens(found) for found in both[:-1]] == wanted
    small = {"max_num_seqs": 4, "max_num_batched_tokens": GEMMA_TOKENS + 3}
    with LLM(str(folder), **SETTINGS, **small) as engine:
        found = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert [tokens(each) for each in found] == wanted
    assert streamed(folder, prompts) == wanted


def test_a_second_turn_neither_encodes_nor_computes_the_crops(llm: LLM) -> None:
    encoder, image = worker_of(llm)._images, picture(*LONG, seed=4)
    (first,) = llm.generate(asked(f"{IMAGE} one", image), GREEDY, use_tqdm=False)
    before, end = encoder.num_encoded, list(first.prompt_token_ids)
    (again,) = llm.generate(asked(f"{IMAGE} one two", image), GREEDY, use_tqdm=False)
    assert encoder.num_encoded == before
    assert again.num_cached_tokens > len(end) - 20 > 3 * GEMMA_TOKENS
    other = picture(*LONG, seed=5)
    (cold,) = llm.generate(asked(f"{IMAGE} one two", other), GREEDY, use_tqdm=False)
    assert encoder.num_encoded == before + 1 and cold.num_cached_tokens < GEMMA_TOKENS + 20


def test_low_detail_has_no_crops(llm: LLM) -> None:
    counts: list[int] = []
    for detail in ("low", "high"):
        url = {"url": data_url(picture(*LONG)), "detail": detail}
        content = [{"type": "image_url", "image_url": url}]
        (found,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        soft = worker_of(llm)._loaded.spec.images.token_id
        counts.append(list(found.prompt_token_ids).count(soft))
    assert counts == [GEMMA_TOKENS, 4 * GEMMA_TOKENS]


def test_off_as_published() -> None:
    assert spec_of(**{**CROPS, "do_pan_and_scan": None}).crops is None
    found = prepared(spec_of(), picture(*LONG))
    assert (found.data.num_tiles, found.lead) == (1, "")
