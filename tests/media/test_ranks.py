"""Images, and prompts as embeddings, on two ranks: answers are those of one, and rank 0 alone
encodes images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.image_oracle import GREEDY, SETTINGS, asked, greedy, tokens, worker_of
from tests.image_writer import MARKS, QWEN_PATCH, data_url, picture, write_any_checkpoint

from quire import LLM, RequestError
from quire.base.platform import detect_platform
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup

pytestmark = pytest.mark.timeout(360)

KINDS = ("smolvlm", "qwen3_vl", "gemma3")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    folder, image = write_any_checkpoint(tmp_path / "model", kind), MARKS[kind]
    images = [[picture(60, 30)], [], [picture(30, 60, seed=1), picture(60, 30)]]
    texts = [f"Look: {image} What?", "Only text.", f"{image} and {image}?"]
    prompts: list[Any] = [asked(text, *each) for text, each in zip(texts, images, strict=True)]
    with LLM(str(folder), **SETTINGS, tensor_parallel_size=2) as llm:
        cold, hit = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
        for found in (cold, hit):
            for output, each in zip(found, images, strict=True):
                assert tokens(output) == greedy(folder, output, each)
        with pytest.raises(RequestError, match="places for images"):
            llm.generate(asked("none", picture(9, 9)), GREEDY, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()
        (again,) = llm.generate(prompts[0], GREEDY, use_tqdm=False)
        assert tokens(again) == tokens(cold[0])


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_images(kind: str, tmp_path: Path) -> None:
    """Rows that the client's encoder made are those of an image on each rank."""
    folder, image = write_any_checkpoint(tmp_path / "model", kind), picture(60, 30)
    with LLM(str(folder), **SETTINGS, enable_mm_embeds=True) as llm:
        renderer, encoder = llm.engine.renderer, worker_of(llm)._images
        low = {"type": "image_url", "image_url": {"url": data_url(image), "detail": "low"}}
        messages, images = renderer.take_images([{"role": "user", "content": [low]}])
        prompt = renderer.render_chat(messages, images=images)
        (part,) = prompt.parts
        tiles: Any = part.data
        form: Any = encoder.encode(tiles, torch.float32).rows
        if kind.startswith("qwen"):
            sides = [tiles.height // QWEN_PATCH, tiles.width // QWEN_PATCH]
            form = {"image_embeds": form, "image_grid_thw": torch.tensor([[1, *sides]])}
        given = asked(f"Look: {MARKS[kind]} What?", form)
        wanted = tokens(*llm.generate(given, GREEDY, use_tqdm=False))
    ranks = {"enable_mm_embeds": True, "tensor_parallel_size": 2}
    with LLM(str(folder), **SETTINGS, **ranks) as llm:
        for _ in range(2):  # the second one finds K/V in the cache
            assert tokens(*llm.generate(given, GREEDY, use_tqdm=False)) == wanted


def test_prompt_embeddings(tmp_path: Path) -> None:
    folder = write_any_checkpoint(tmp_path / "model", "smolvlm")
    rows = torch.randn(300, 32, generator=torch.Generator().manual_seed(1))
    prompts: list[Any] = [{"prompt_embeds": rows[:20]}, "Only text.", {"prompt_embeds": rows}]
    found: list[list[list[int]]] = []
    for ranks in (1, 2):
        settings = {**SETTINGS, "enable_prompt_embeds": True, "tensor_parallel_size": ranks}
        with LLM(str(folder), **settings) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        found.append([tokens(each) for each in outputs])
    assert found[0] == found[1]


def test_a_rank_counts_the_whole_encoder(tmp_path: Path) -> None:
    folder = write_any_checkpoint(tmp_path / "model", "gemma3")
    weights: dict[tuple[int, int], int] = {}
    images = None
    for ranks in (1, 2):
        for limit in (0, 1):
            settings = EngineSettings.from_options(
                {
                    "model": str(folder),
                    **SETTINGS,
                    "tensor_parallel_size": ranks,
                    "limit_mm_per_prompt": {"image": limit},
                }
            )
            plan = plan_startup(settings, detect_platform()).resolved
            weights[ranks, limit] = plan.memory.fixed.weights
            images = plan.spec.images
    assert images is not None
    for ranks in (1, 2):
        assert weights[ranks, 1] - weights[ranks, 0] == images.num_parameters * 4
