"""Answers of Qwen2.5-VL, Qwen3-VL and Qwen3.5 equal `generate` of transformers, and the laws hold
as for text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.image_oracle import GREEDY, SETTINGS, asked, generated, streamed, tokens, worker_of
from tests.image_writer import (
    QWEN_IMAGE,
    QWEN_PAD,
    as_bytes,
    picture,
    write_qwen_checkpoint,
)

from quire import LLM, RequestError, SamplingParams
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.platform import detect_platform

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
LONGER = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


def keeps_states(llm: LLM) -> bool:
    return bool(worker_of(llm)._loaded.spec.states)


def test_answers_are_those_of_generate(llm: LLM, folder: Path) -> None:
    """Alone and in a batch with text; one image, several of different shapes."""
    first, second = picture(60, 30), picture(30, 90, seed=1)
    prompts: list[Any] = [
        asked(f"Look: {QWEN_IMAGE} What?", first),
        "Only text here.",
        asked(f"{QWEN_IMAGE}{QWEN_IMAGE} Compare.", second, first),
        asked(QWEN_IMAGE, second.convert("L")),
        asked(f"Look: {QWEN_IMAGE} What?", as_bytes(first)),
    ]
    images = [[first], [], [second, first], [second.convert("L").convert("RGB")], [first]]
    batch = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, given, output in zip(prompts, images, batch, strict=True):
        wanted = generated(folder, list(output.prompt_token_ids), given)
        assert tokens(output) == wanted
        llm.reset_prefix_cache()
        assert tokens(*llm.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_qwen3_5_with_experts(tmp_path: Path) -> None:
    folder = write_qwen_checkpoint(tmp_path / "model", "qwen3_5_moe")
    image = picture(60, 30)
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.generate(asked(f"Look: {QWEN_IMAGE}?", image), GREEDY, use_tqdm=False)
    assert tokens(output) == generated(folder, list(output.prompt_token_ids), [image])


def test_whole_is_chunked_at_every_cut(folder: Path) -> None:
    """Chunks that begin and end at each place around the image, and in it."""
    prompt = asked(f"So {QWEN_IMAGE} it", picture(40, 24))
    with LLM(str(folder), **SETTINGS) as whole:
        wanted = tokens(*whole.generate(prompt, GREEDY, use_tqdm=False))
    for size in (1, 2, 3, 5, 7, 11):
        chunked = {**SETTINGS, "max_num_batched_tokens": size, "max_num_seqs": 1}
        with LLM(str(folder), **chunked) as engine:
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_preempted_requests_keep_their_images(folder: Path) -> None:
    """A pool that holds less than two of them."""
    prompts = [asked(f"See {QWEN_IMAGE} now", picture(60, 40, seed=i)) for i in range(4)]
    with LLM(str(folder), **SETTINGS) as engine:
        wanted = [tokens(each) for each in engine.generate(prompts, LONGER, use_tqdm=False)]
    small = {**SETTINGS, "num_kv_blocks": 12, "max_model_len": 160}
    with LLM(str(folder), **small) as engine:
        found = [tokens(each) for each in engine.generate(prompts, LONGER, use_tqdm=False)]
        stats: Any = engine.engine.client
        assert stats._core.stats().preempted_total > 0
    assert found == wanted


def test_a_second_turn_does_not_encode_the_image(llm: LLM) -> None:
    image, worker = picture(48, 80, seed=7), worker_of(llm)
    start = f"User: {QWEN_IMAGE} What is this picture, and what else is there to see in it?"
    before = worker._images.num_encoded
    (first,) = llm.generate(asked(start, image), GREEDY, use_tqdm=False)
    assert worker._images.num_encoded == before + 1
    following = start + first.outputs[0].text + " And?"
    (second,) = llm.generate(asked(following, image), GREEDY, use_tqdm=False)
    assert worker._images.num_encoded == before + 1
    image_id = worker._loaded.spec.images.token_id
    image_end = max(i for i, token in enumerate(first.prompt_token_ids) if token == image_id)
    if not keeps_states(llm):  # these continue where a state was kept
        assert second.num_cached_tokens >= image_end // 16 * 16
    (third,) = llm.generate(asked(start, picture(48, 80, seed=8)), GREEDY, use_tqdm=False)
    assert list(third.prompt_token_ids) == list(first.prompt_token_ids)
    assert third.num_cached_tokens < 16
    assert worker._images.num_encoded == before + 2


def test_a_chat_with_an_image_continues_where_it_ended(llm: LLM) -> None:
    """Cached or not, with recurrent states too."""
    chat: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": picture(48, 80, seed=11)},
                {"type": "text", "text": "What is this picture, and what else is there in it?"},
            ],
        }
    ]
    (first,) = llm.chat(chat, GREEDY, use_tqdm=False)
    chat += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And?"},
    ]
    (hit,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert hit.num_cached_tokens > 60 // 16 * 16 >= 16
    llm.reset_prefix_cache()
    (cold,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert cold.num_cached_tokens == 0
    assert tokens(hit) == tokens(cold)


def test_equal_pixels_in_another_shape_are_another_image(llm: LLM, folder: Path) -> None:
    """Fault: the digest of an image of one colour tells nothing of its rows and columns."""
    wide, high = (
        Image.fromarray(np.full((*size, 3), 77, np.uint8)) for size in ((16, 64), (64, 16))
    )
    text = f"{QWEN_IMAGE} colours"
    for image in (wide, high, wide):
        (output,) = llm.generate(asked(text, image), GREEDY, use_tqdm=False)
        assert tokens(output) == generated(folder, list(output.prompt_token_ids), [image])


def test_after_a_sleep_images_are_read_again(folder: Path) -> None:
    prompt = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    with LLM(str(folder), **SETTINGS) as engine:
        wanted = tokens(*engine.generate(prompt, GREEDY, use_tqdm=False))
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_samples_of_a_prompt_share_its_image(llm: LLM) -> None:
    """Forks take over the positions behind an image."""
    prompt = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    params = [
        SamplingParams(n=n, seed=3, max_tokens=10, temperature=1.0, ignore_eos=True) for n in (3, 1)
    ]
    (several,), (alone,) = (llm.generate(prompt, each, use_tqdm=False) for each in params)
    assert list(several.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    assert len({tuple(each.token_ids) for each in several.outputs}) == 3


def test_streams_are_those_of_generate(folder: Path, llm: LLM) -> None:
    """Several streams with images beside one of text; nothing is left of them."""
    prompts: list[Any] = [asked(f"See {QWEN_IMAGE} now", picture(60, 40, seed=i)) for i in range(3)]
    prompts.append("Only text.")
    wanted = [tokens(each) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert streamed(folder, prompts) == wanted


def test_prompt_embeddings_beside_images(folder: Path, llm: LLM) -> None:
    """Fault: rows of two widths in one step."""
    image = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    (wanted,) = llm.generate(image, GREEDY, use_tqdm=False)
    embeds: Any = {"prompt_embeds": torch.randn(20, 32, generator=torch.Generator().manual_seed(1))}
    with LLM(str(folder), **SETTINGS, enable_prompt_embeds=True) as engine:
        (alone,) = engine.generate(embeds, GREEDY, use_tqdm=False)
        found = engine.generate([image, embeds, image], GREEDY, use_tqdm=False)
    assert [tokens(each) for each in found] == [tokens(wanted), tokens(alone), tokens(wanted)]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_language_model_in_few_bits(folder: Path, quantization: str) -> None:
    prompt = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    with LLM(str(folder), **SETTINGS, quantization=quantization) as engine:
        (alone,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        batch = engine.generate([prompt, "text", prompt], GREEDY, use_tqdm=False)
    assert [tokens(batch[0]), tokens(batch[2])] == [tokens(alone)] * 2


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_the_checkpoints_own_dtype(folder: Path, dtype: str) -> None:
    prompt = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    with LLM(str(folder), **{**SETTINGS, "dtype": dtype}) as engine:
        (alone,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        batch = engine.generate([prompt, "text", prompt], GREEDY, use_tqdm=False)
    assert [tokens(batch[0]), tokens(batch[2])] == [tokens(alone)] * 2


def test_text_alone_by_a_limit_of_no_images(folder: Path, llm: LLM) -> None:
    with LLM(str(folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as engine:
        assert worker_of(engine)._loaded.tower is None
        assert worker_of(engine)._loaded.spec.position_axes == 1
        (found,) = engine.generate("Only text.", GREEDY, use_tqdm=False)
    assert tokens(found) == tokens(*llm.generate("Only text.", GREEDY, use_tqdm=False))


def test_a_text_that_spells_the_token_is_text(llm: LLM) -> None:
    parts = [
        {"type": "text", "text": f"What is {QWEN_PAD}?"},
        {"type": "image_pil", "image_pil": picture(16, 16)},
        {"type": "text", "text": QWEN_IMAGE},
    ]
    (found,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    image_id = worker_of(llm)._loaded.spec.images.token_id
    assert list(found.prompt_token_ids).count(image_id) == 4


def test_an_image_that_is_too_narrow_is_refused_by_its_place(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"multi_modal_data.image\[0\]: the image has 1 x 201"):
        llm.generate(asked(QWEN_IMAGE, picture(1, 201)), GREEDY, use_tqdm=False)


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_videos_are_refused_by_name(llm: LLM, kind: str) -> None:
    parts = [{"type": kind, kind: {"url": "data:video/mp4;base64,AA=="}}]
    with pytest.raises(RequestError, match=kind):
        llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"'video'.*no model has an encoder"):
        llm.generate({"prompt": "x", "multi_modal_data": {"video": [1]}}, GREEDY, use_tqdm=False)


def test_the_plan_counts_the_encoder_for_the_longest_prompt(folder: Path) -> None:
    memory = {"image_cache": 0, "image_memory": 1000}
    settings = EngineSettings.from_options({"model": str(folder), **SETTINGS, **memory})
    plan = plan_startup(settings, detect_platform()).resolved
    images = plan.spec.images
    assert images is not None
    assert plan.memory.fixed.images == images.work_elements(512) * 4 + 1000
    assert images.work_elements(10) < images.work_elements(40) == images.work_elements(512)
