"""Images in prompts, on SmolVLM and Idefics 3: forms, refusals, caches and counts."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests import waiting
from tests.image_oracle import (
    GREEDY,
    SETTINGS,
    asked,
    last_tokens,
    oracle,
    tokens,
    worker_of,
)
from tests.image_writer import (
    IMAGE,
    TOKENS_PER_TILE,
    data_url,
    picture,
    write_vision_checkpoint,
)

from quire import LLM, AsyncLLM, ConfigError, LoRARequest, RequestError
from quire.base.platform import detect_platform
from quire.config.render_plan import render_plan
from quire.config.settings import EngineSettings
from quire.config.startup import find_model, plan_startup
from quire.protocol.media import ImageTiles
from quire.text.rendering.media.idefics3 import make_tiles
from quire.text.rendering.media.images import ImagesByName
from quire.text.rendering.media.parts import images_of
from quire.text.rendering.media.sources import RowsSource


@pytest.fixture(scope="session", params=["smolvlm", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


def test_rows_of_the_tower_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    model, processor = oracle(folder)
    worker, image = worker_of(llm), picture(100, 70)
    spec = worker._loaded.spec.images
    tiles = make_tiles(spec, image, splits=True)
    rows = worker._images.encode(tiles, torch.float32).rows
    with torch.inference_mode():
        found = model.get_image_features(**processor([[image]], return_tensors="pt"))
    wanted = torch.cat(found.pooler_output)
    assert rows.shape == wanted.shape
    assert float((rows - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_prompts_have_the_token_ids_of_transformers(llm: LLM, folder: Path) -> None:
    """The processor there writes the tokens as text, before it tokenizes."""
    from transformers import AutoTokenizer
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for width, height in ((100, 70), (10, 300), (40, 40)):
        prompt = llm.engine.renderer.render_prompt(
            asked(f"See {IMAGE} now", picture(width, height))
        )
        rows, columns = worker_of(llm)._loaded.spec.images.grid(width, height, splits=True)
        text = get_image_prompt_string(
            *(rows if rows * columns > 1 else 0, columns if rows * columns > 1 else 0),
            TOKENS_PER_TILE,
            fake_token_around_image="<fake_token_around_image>",
            image_token=IMAGE,
            global_image_token="<global-img>",
        )
        assert prompt.token_ids == tokenizer(f"See {text} now")["input_ids"]


def test_paths_and_token_ids(llm: LLM, tmp_path: Path) -> None:
    image = picture(50, 60)
    image.save(tmp_path / "a.png")
    text = f"User:{IMAGE}What?<end_of_utterance>\nAssistant:"
    wanted = tokens(*llm.generate(asked(text, image), GREEDY, use_tqdm=False))
    for given in (tmp_path / "a.png", str(tmp_path / "a.png")):
        assert tokens(*llm.generate(asked(text, given), GREEDY, use_tqdm=False)) == wanted
    bare = llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
    given_ids = {"prompt_token_ids": bare, "multi_modal_data": {"image": image}}
    wanted = tokens(*llm.generate(given_ids, GREEDY, use_tqdm=False))
    part, question = {"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What?"}
    (chat,) = llm.chat([{"role": "user", "content": [part, question]}], GREEDY, use_tqdm=False)
    assert tokens(chat) == wanted


def test_images_by_name(llm: LLM) -> None:
    """`multi_modal_uuids` and `uuid` of vLLM: a name stands for the image that had it before."""
    first, second, text = picture(50, 60), picture(60, 50, seed=1), f"A {IMAGE} and {IMAGE} B"
    prompt = {**asked(text, first, second), "multi_modal_uuids": {"image": ["one", None]}}
    (wanted,) = llm.generate(asked(text, first, second), GREEDY, use_tqdm=False)
    named: dict[str, Any] = {
        "prompt": text,
        "multi_modal_data": {"image": [None, second]},
        "multi_modal_uuids": {"image": ["one", "two"]},
    }
    both = {"prompt": text, "multi_modal_uuids": {"image": ["one", "two"]}}
    for each in (prompt, named, both):
        assert tokens(*llm.generate(each, GREEDY, use_tqdm=False)) == tokens(wanted)
    url = {"url": data_url(first), "detail": "low"}
    sent = {"type": "image_url", "image_url": url, "uuid": "three"}
    chats: list[list[int]] = []
    for part in (sent, {"type": "image_url", "image_url": {"detail": "low"}, "uuid": "three"}):
        (found,) = llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)
        chats.append([*found.prompt_token_ids, *tokens(found)])
    assert chats[0] == chats[1]


def test_a_named_image_is_kept_as_it_was(llm: LLM) -> None:
    """The program may draw on its image of Pillow after it was sent."""
    image, text = picture(50, 60, seed=8), f"A {IMAGE}"
    sent = {**asked(text, image), "multi_modal_uuids": {"image": ["drawn"]}}
    (first,) = llm.generate(sent, GREEDY, use_tqdm=False)
    encoder = worker_of(llm)._images
    before = encoder.num_encoded
    image.paste((255, 0, 0), (0, 0, 50, 60))
    (again,) = llm.generate(
        {"prompt": text, "multi_modal_uuids": {"image": ["drawn"]}}, GREEDY, use_tqdm=False
    )
    assert tokens(again) == tokens(first) and encoder.num_encoded == before


def test_a_grid_is_kept_as_it_was() -> None:
    grid = [[1, 2, 4]]
    rows = {"image_embeds": torch.zeros(2, 4), "image_grid_thw": grid}
    (source,) = images_of({"multi_modal_data": {"image": rows}})
    grid[0][1] = 6
    assert isinstance(source.value, RowsSource)
    assert source.value.read("image", 1000)[1] == (1, 2, 4)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"multi_modal_uuids": {"image": ["lost"]}},
            r"multi_modal_uuids\.image\[0\] is 'lost', and no image of that name is kept",
        ),
        ({"multi_modal_uuids": {"image": [7]}}, r"multi_modal_uuids\.image\[0\] is 7: send a text"),
        ({"multi_modal_uuids": {"video": ["a"]}}, "multi_modal_uuids has 'video'"),
        ({"multi_modal_uuids": "a"}, "multi_modal_uuids is 'a': give"),
        (
            {**asked("", picture(9, 9)), "multi_modal_uuids": {"image": ["a", "b"]}},
            "2 names for 1 images",
        ),
        (
            {**asked("", np.zeros((4, 4, 3))), "multi_modal_uuids": {"image": ["a"]}},
            "give an image of Pillow, bytes, a path or a URL",
        ),
    ],
)
def test_names_that_are_refused(fields: dict[str, Any], wanted: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=wanted):
        llm.generate({**fields, "prompt": IMAGE}, GREEDY, use_tqdm=False)


def test_named_images_that_were_used_least_recently_go_first() -> None:
    kept = ImagesByName(100)
    for name in ("a", "b"):
        kept.put(name, name, 40)
    assert kept.find("a", "here") == "a"
    kept.put("c", "c", 40)
    with pytest.raises(RequestError, match="here is 'b', and no image of that name is kept"):
        kept.find("b", "here")
    kept.put("a", "new", 70)
    assert kept.find("a", "here") == "new"
    kept.put("large", "large", 101)
    with pytest.raises(RequestError, match="'large'"):
        kept.find("large", "here")


def test_low_detail_takes_one_tile(llm: LLM) -> None:
    url = {"url": data_url(picture(100, 70)), "detail": "low"}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    (found,) = llm.chat(messages, GREEDY, use_tqdm=False)
    ids = list(found.prompt_token_ids)
    image_id = worker_of(llm)._loaded.spec.images.token_id
    assert ids.count(image_id) == TOKENS_PER_TILE


def test_equal_tiles_at_equal_places_share_blocks_only_as_the_same_image(llm: LLM) -> None:
    """An image of one colour has equal tiles; another with the same first tile is another one."""
    plain = np.full((28, 84, 3), 77, np.uint8)
    other = plain.copy()
    other[:, 60:] = 200
    both = [Image.fromarray(each) for each in (plain, other)]
    text = f"{IMAGE} colours"
    answers = [tokens(*llm.generate(asked(text, each), GREEDY, use_tqdm=False)) for each in both]
    (again,) = llm.generate(asked(text, both[0]), GREEDY, use_tqdm=False)
    assert tokens(again) == answers[0]
    assert answers[0] != answers[1]


def test_nothing_is_left_when_requests_end(llm: LLM) -> None:
    llm.generate([asked(IMAGE, picture(30, 30, seed=i)) for i in range(3)], GREEDY, use_tqdm=False)
    assert not llm._llm_engine._media
    llm.generate("end", GREEDY, use_tqdm=False)
    assert not worker_of(llm)._media._rows


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (asked("no place", picture(9, 9)), "0 places for images .* and 1 images"),
        (asked(IMAGE * 2, picture(9, 9)), "2 places"),
        (asked(IMAGE * 17, *[picture(9, 9)] * 17), "at most 16 are taken"),
        (asked(IMAGE, b"<svg/>"), r"multi_modal_data.image\[0\] cannot be read as an image"),
        (asked(IMAGE, 3), r"multi_modal_data.image\[0\] is 3"),
        ({"prompt": "x", "multi_modal_data": {"audio": [1.0]}}, "'audio'.*no model has an encoder"),
        ({"prompt": "x", "multi_modal_data": [1]}, "give {.image.: image}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    good, bad = llm.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert good.error is None and bad.error is not None


def test_models_of_text_alone_refuse_images_in_one_way() -> None:
    with LLM(**SETTINGS) as text:
        for ask in (
            lambda: text.generate(asked("x", picture(9, 9)), GREEDY),
            lambda: text.chat(
                [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture(9, 9)}]}]
            ),
        ):
            with pytest.raises(RequestError, match="The served model takes text only"):
                ask()


def test_a_sleeping_engine_says_so(folder: Path) -> None:
    """Fault: it says that the model takes text only."""
    with LLM(str(folder), **SETTINGS) as llm:
        llm.sleep(level=2)
        worker = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match="the engine sleeps: wake it up"):
            worker.put_media(0, ImageTiles(b"", 1, 28, 28))


def test_random_weights_have_a_tower_too(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS, load_format="dummy") as engine:
        (found,) = engine.generate(asked(IMAGE, picture(20, 20)), GREEDY, use_tqdm=False)
    assert len(tokens(found)) == 12


def test_the_cache_of_images_is_bounded(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS, image_cache=0) as engine:
        images = worker_of(engine)._images
        for _ in range(2):
            engine.generate(asked(IMAGE, picture(20, 20)), GREEDY, use_tqdm=False)
        assert images.num_encoded == 2
        assert (images._num_bytes, len(images._kept)) == (0, 0)


def test_adapters_act_on_the_language_model(folder: Path, tmp_path: Path) -> None:
    """An image is encoded once for all adapters, and each has K/V of its own."""
    adapter = tmp_path / "adapter"
    write_adapter(adapter)
    prompt = asked(f"See {IMAGE} now", picture(60, 40))
    lora = LoRARequest("a", 1, str(adapter))
    with LLM(str(folder), **SETTINGS, enable_lora=True) as engine:
        plain = tokens(*engine.generate(prompt, GREEDY, use_tqdm=False))
        (adapted,) = engine.generate(prompt, GREEDY, use_tqdm=False, lora_request=lora)
        assert adapted.num_cached_tokens == 0
        assert tokens(adapted) != plain
        assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == plain
        assert worker_of(engine)._images.num_encoded == 1


def write_adapter(folder: Path) -> None:
    """Write an adapter of one matrix in PEFT's form."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = "base_model.model.model.text_model.layers.{}.mlp.down_proj.lora_{}.weight"
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        tensors[names.format(layer, "A")] = torch.randn(4, 48, generator=random)
        tensors[names.format(layer, "B")] = torch.randn(32, 4, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_a_stream_whose_image_cannot_be_read_fails_alone(folder: Path) -> None:
    async def work() -> None:
        with AsyncLLM(str(folder), **SETTINGS) as engine:
            good = asyncio.create_task(last_tokens(engine, asked(IMAGE, picture(60, 40))))
            with pytest.raises(RequestError, match="cannot be read as an image"):
                await last_tokens(engine, asked(IMAGE, b"<svg/>"))
            assert len(await good) == 12
            await last_tokens(engine, "text")
            worker: Any = engine.engine.client
            assert not worker._core._executor._worker._media._rows

    asyncio.run(work())


def test_a_request_that_is_cancelled_while_its_image_is_encoded_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: rows that come after the cancellation stay in memory."""

    async def work() -> None:
        with AsyncLLM(str(folder), **SETTINGS) as engine:
            client: Any = engine.engine.client
            worker: Any = client._core._executor._worker
            begins, goes_on, encoded = threading.Event(), threading.Event(), worker._encoded

            def slow(tiles: ImageTiles) -> Any:
                begins.set()
                assert goes_on.wait(60.0)
                return encoded(tiles)

            monkeypatch.setattr(worker, "_encoded", slow)
            drops = list[tuple[int, ...]]()
            drop = worker.drop_media
            monkeypatch.setattr(
                worker, "drop_media", lambda handles: (drops.append(handles), drop(handles))
            )
            stream = engine.generate(asked(f"See {IMAGE} now", picture(60, 40)), GREEDY)
            task = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(begins.wait, 60.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(waiting.wait_for, lambda: drops, "the first drop")
            goes_on.set()
            await asyncio.to_thread(
                waiting.wait_for,
                lambda: not worker._media._rows and len(drops) == 2,
                "end of the rows",
            )

    asyncio.run(work())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"limit_mm_per_prompt": {"image": 0}}, "limit_mm_per_prompt allows none"),
        (
            {"speculative_config": {"method": "eagle", "model": "heads"}},
            "speculative_config has eagle, which reads no images",
        ),
    ],
    ids=str,
)
def test_why_a_model_is_served_for_text_alone(
    folder: Path, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = find_model(EngineSettings.from_options({"model": str(folder), **settings}))
    assert found.spec.images is None
    assert reason in caplog.text


def test_a_folder_without_a_processor_is_served_for_text_alone(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_model(EngineSettings(model=str(other))).spec.images is None
    assert "no preprocessor_config.json" in caplog.text


def test_a_missing_tensor_of_the_tower_is_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    del tensors["model.vision_model.post_layernorm.bias"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"post_layernorm\.bias.*of the image encoder missing"):
        LLM(str(other), **SETTINGS)


def test_the_plan_counts_the_encoder_and_its_cache(folder: Path) -> None:
    settings = EngineSettings.from_options({"model": str(folder), **SETTINGS})
    bare = EngineSettings.from_options(
        {"model": str(folder), **SETTINGS, "limit_mm_per_prompt": {"image": 0}}
    )
    plans = [plan_startup(each, detect_platform()).resolved for each in (settings, bare)]
    spec = plans[0].spec.images
    assert spec is not None
    weights = [each.memory.fixed.weights for each in plans]
    assert weights[0] - weights[1] == spec.num_parameters * 4
    assert plans[0].memory.fixed.images >= settings.image_cache > 0 == plans[1].memory.fixed.images
    assert "images" in render_plan(plans[0]) and "images" not in render_plan(plans[1])


def test_check_model_compares_the_text_model(folder: Path, capsys: Any) -> None:
    from quire.entrypoints.cli.main import main

    assert main(["check-model", str(folder), "--dtype", "float32"]) == 0
    assert "transformers" in capsys.readouterr().out
