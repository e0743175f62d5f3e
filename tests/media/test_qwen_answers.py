"""Answers of Qwen2.5-VL, Qwen3-VL and Qwen3.5 about images, beyond the laws of all families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.image_oracle import GREEDY, SETTINGS, asked, greedy, tokens, worker_of
from tests.image_writer import (
    QWEN_IMAGE,
    picture,
    write_qwen_checkpoint,
)

from quire import LLM, RequestError

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


def test_qwen3_5_with_experts(tmp_path: Path) -> None:
    folder = write_qwen_checkpoint(tmp_path / "model", "qwen3_5_moe")
    image = picture(60, 30)
    with LLM(str(folder), **SETTINGS) as llm:
        (output,) = llm.generate(asked(f"Look: {QWEN_IMAGE}?", image), GREEDY, use_tqdm=False)
    assert tokens(output) == greedy(folder, output, [image])


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
        assert tokens(output) == greedy(folder, output, [image])


def test_prompt_embeddings_beside_images(folder: Path, llm: LLM) -> None:
    """Fault: rows of two widths in one step."""
    image = asked(f"See {QWEN_IMAGE} now", picture(60, 40))
    (wanted,) = llm.generate(image, GREEDY, use_tqdm=False)
    embeds: Any = {"prompt_embeds": torch.randn(20, 32, generator=torch.Generator().manual_seed(1))}
    with LLM(str(folder), **SETTINGS, enable_prompt_embeds=True) as engine:
        (alone,) = engine.generate(embeds, GREEDY, use_tqdm=False)
        found = engine.generate([image, embeds, image], GREEDY, use_tqdm=False)
    assert [tokens(each) for each in found] == [tokens(wanted), tokens(alone), tokens(wanted)]


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


def test_work_grows_with_the_prompt_up_to_the_largest_image(llm: LLM) -> None:
    images = worker_of(llm)._loaded.spec.images
    assert images.work_elements(10) < images.work_elements(40) == images.work_elements(512)
