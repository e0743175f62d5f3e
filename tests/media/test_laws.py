"""Laws of images in prompts, for all families: tokens equal `generate` of transformers, and hold
whatever is computed beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.image_oracle import GREEDY, SETTINGS, asked, greedy, streamed, tokens, worker_of
from tests.image_writer import (
    GEMMA_BEGIN,
    GEMMA_SOFT,
    GEMMA_TOKENS,
    MARKS,
    QWEN_PAD,
    as_bytes,
    data_url,
    picture,
)

from quire import LLM, RequestError, SamplingParams
from quire.base.platform import detect_platform
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup

LONGER = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SPELLINGS = {mark: mark for mark in MARKS.values()} | {GEMMA_BEGIN: GEMMA_BEGIN + GEMMA_SOFT}


@pytest.fixture(scope="module")
def llm(kind_folder: Path) -> Iterator[LLM]:
    with LLM(str(kind_folder), **SETTINGS) as engine:
        yield engine


def is_whole(kind: str) -> bool:
    """Return whether the tokens of an image see each other, so that no step cuts them."""
    return kind == "gemma3"


def test_answers_are_those_of_generate(llm: LLM, kind_folder: Path, mark: str) -> None:
    """Alone, streamed and in a batch with text; one image, several, and forms of the same one. Some
    text is longer than the windows of layers that slide."""
    first, second = picture(100, 70), picture(30, 90, seed=1)
    words = "This sentence is longer than the window of the layers that slide, by some way. "
    prompts: list[Any] = [
        asked(f"Look: {mark} What?", first),
        "Only text here.",
        asked(f"{mark}{mark} Compare.", second, first),
        asked(mark, second.convert("L")),
        asked(f"Look: {mark} What?", as_bytes(first)),
        asked(f"{words}{mark}{words}{mark}\n{words}", first, second),
    ]
    grey = second.convert("L").convert("RGB")
    images = [[first], [], [second, first], [grey], [first], [first, second]]
    batch = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, given, output in zip(prompts, images, batch, strict=True):
        wanted = tokens(output)
        assert wanted == greedy(kind_folder, output, given)
        llm.reset_prefix_cache()
        assert tokens(*llm.generate(prompt, GREEDY, use_tqdm=False)) == wanted
        deltas = [list(each.outputs[0].token_ids) for each in llm.stream(prompt, GREEDY)]
        assert deltas[-1] == wanted


def test_chats_in_all_forms(llm: LLM, kind_folder: Path) -> None:
    image, wanted = picture(50, 60), list[int]()
    question = {"type": "text", "text": "What?"}
    for part in (
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": as_bytes(image)},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "image_url", "image_url": data_url(image)},
        {"type": "input_image", "image_url": data_url(image), "detail": "auto"},
    ):
        messages = [{"role": "user", "content": [part, question]}]
        (found,) = llm.chat(messages, GREEDY, use_tqdm=False)
        wanted = wanted or greedy(kind_folder, found, [image])
        assert tokens(found) == wanted


def test_a_text_that_spells_the_tokens_is_text(llm: LLM, mark: str) -> None:
    """Fault: text that a user writes takes the place of an image."""
    images = worker_of(llm)._loaded.spec.images
    spelled = SPELLINGS[mark]

    def counts(*content: Any) -> list[int]:
        (found,) = llm.chat([{"role": "user", "content": [*content]}], GREEDY, use_tqdm=False)
        ids = list(found.prompt_token_ids)
        return [ids.count(images.token_id), ids.count(images.place_id)]

    texts = [{"type": "text", "text": f"What is {text}?"} for text in (spelled, QWEN_PAD, mark)]
    image = {"type": "image_pil", "image_pil": picture(20, 20)}
    alone = counts(image)
    assert all(alone)
    assert counts(texts[0], image, *texts[1:]) == alone
    assert counts(*texts) == [0, 0]


def test_whole_is_chunked_at_every_cut(kind: str, kind_folder: Path, mark: str) -> None:
    """Chunks that begin and end at each place around images, and in them if they may."""
    images = [picture(40, 24), picture(24, 40)]
    prompt = asked(f"So\n{mark} it {mark}is", *images)
    with LLM(str(kind_folder), **SETTINGS) as whole:
        (output,) = whole.generate(prompt, GREEDY, use_tqdm=False)
    wanted, length = tokens(output), len(output.prompt_token_ids)
    assert wanted == greedy(kind_folder, output, images)
    sizes = (1, 2, 3, 5, 7, 11, 13)
    if is_whole(kind):
        sizes = (*range(GEMMA_TOKENS, GEMMA_TOKENS + 9), 35, 36, 37, length - 1)
    for size in sizes:
        chunked = {**SETTINGS, "max_num_batched_tokens": size, "max_num_seqs": 1}
        with LLM(str(kind_folder), **chunked) as engine:
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_preempted_requests_keep_their_images(kind: str, kind_folder: Path, mark: str) -> None:
    """In a pool that cannot hold all of them, however long they get."""
    prompts = [asked(f"See {mark} now", picture(60, 40, seed=i)) for i in range(4)]
    with LLM(str(kind_folder), **SETTINGS) as engine:
        wanted = [tokens(each) for each in engine.generate(prompts, LONGER, use_tqdm=False)]
    small: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 160}
    if is_whole(kind):  # its layers that slide have blocks of their own
        small = {"num_kv_blocks": 34, "max_model_len": 120, "enable_prefix_caching": False}
    with LLM(str(kind_folder), **{**SETTINGS, **small}) as engine:
        found = [tokens(each) for each in engine.generate(prompts, LONGER, use_tqdm=False)]
        client: Any = engine.engine.client
        assert client._core.stats().preempted_total > 0
    assert found == wanted


def test_a_second_turn_neither_encodes_nor_computes_the_image(llm: LLM, mark: str) -> None:
    image, worker = picture(48, 80, seed=7), worker_of(llm)
    start = f"User: {mark} What is this picture, and what else is there to see in it?"
    before = worker._images.num_encoded
    (first,) = llm.generate(asked(start, image), GREEDY, use_tqdm=False)
    following = start + first.outputs[0].text + " And?"
    (second,) = llm.generate(asked(following, image), GREEDY, use_tqdm=False)
    assert worker._images.num_encoded == before + 1
    spec, ids = worker._loaded.spec, list(first.prompt_token_ids)
    image_end = max(place for place, token in enumerate(ids) if token == spec.images.token_id)
    if not spec.states:  # these continue where a state was kept
        assert second.num_cached_tokens >= image_end // 16 * 16
    (third,) = llm.generate(asked(start, picture(48, 80, seed=8)), GREEDY, use_tqdm=False)
    assert list(third.prompt_token_ids) == ids
    assert third.num_cached_tokens < 16
    assert worker._images.num_encoded == before + 2


def test_after_a_sleep_images_are_read_again(kind_folder: Path, mark: str) -> None:
    prompt = asked(f"See {mark} now", picture(60, 40))
    with LLM(str(kind_folder), **SETTINGS) as engine:
        wanted = tokens(*engine.generate(prompt, GREEDY, use_tqdm=False))
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_samples_of_a_prompt_share_its_image(llm: LLM, mark: str) -> None:
    """Forks take over the positions behind an image."""
    prompt = asked(f"See {mark} now", picture(60, 40))
    params = [
        SamplingParams(n=n, seed=3, max_tokens=10, temperature=1.0, ignore_eos=True) for n in (3, 1)
    ]
    (several,), (alone,) = (llm.generate(prompt, each, use_tqdm=False) for each in params)
    assert list(several.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    assert len({tuple(each.token_ids) for each in several.outputs}) == 3


def test_streams_are_those_of_generate(kind_folder: Path, llm: LLM, mark: str) -> None:
    """Several streams with images beside one of text; nothing is left of them."""
    prompts: list[Any] = [asked(f"See {mark} now", picture(60, 40, seed=i)) for i in range(3)]
    prompts.append("Only text.")
    wanted = [tokens(each) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert streamed(kind_folder, prompts) == wanted


@pytest.mark.parametrize(
    "changes",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_in_few_bits(kind_folder: Path, mark: str, changes: dict[str, str]) -> None:
    """Answers do not depend on the batch."""
    prompt = asked(f"See {mark} now", picture(60, 40))
    with LLM(str(kind_folder), **{**SETTINGS, **changes}) as engine:
        (alone,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        batch = engine.generate([prompt, "text", prompt], GREEDY, use_tqdm=False)
    assert [tokens(batch[0]), tokens(batch[2])] == [tokens(alone)] * 2


def test_text_alone_by_a_limit_of_no_images(kind_folder: Path, llm: LLM, mark: str) -> None:
    """Also in steps that would hold no image."""
    small = {"limit_mm_per_prompt": {"image": 0}, "max_num_batched_tokens": 4, "max_num_seqs": 1}
    with LLM(str(kind_folder), **SETTINGS, **small) as engine:
        loaded = worker_of(engine)._loaded
        assert (loaded.tower, loaded.spec.position_axes) == (None, 1)
        (found,) = engine.generate("Only text.", GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="takes text only"):
            engine.generate(asked(mark, picture(9, 9)), GREEDY, use_tqdm=False)
    assert tokens(found) == tokens(*llm.generate("Only text.", GREEDY, use_tqdm=False))


def test_the_plan_counts_the_encoder(kind_folder: Path) -> None:
    """For the longest prompt."""
    memory = {"image_cache": 0, "image_memory": 1000}
    settings = EngineSettings.from_options({"model": str(kind_folder), **SETTINGS, **memory})
    plan = plan_startup(settings, detect_platform()).resolved
    images = plan.spec.images
    assert images is not None
    assert plan.memory.fixed.images == images.work_elements(512) * 4 + 1000
