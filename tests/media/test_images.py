"""Images in prompts: tokens equal `generate` of transformers, and the laws hold as for text."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.image_writer import (
    IMAGE,
    TOKENS_PER_TILE,
    as_bytes,
    picture,
    write_vision_checkpoint,
)

from quire import LLM, RequestError, SamplingParams
from quire.rendering.media.idefics3 import make_tiles

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quiet": True,
    "num_kv_blocks": 256,
    "block_size": 16,
    "max_model_len": 512,
}


@pytest.fixture(scope="session", params=["smolvlm", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as engine:
        yield engine


@functools.cache
def oracle(folder: Path) -> tuple[Any, Any]:
    """Model and image processor of transformers."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    return model.eval(), Idefics3ImageProcessorPil.from_pretrained(folder)


def generated(
    folder: Path, prompt_ids: list[int], images: list[Image.Image], count: int = 12
) -> list[int]:
    model, processor = oracle(folder)
    ids = torch.tensor([prompt_ids])
    pixels = {} if not images else dict(processor([images], return_tensors="pt"))
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **pixels,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return found[0, len(prompt_ids) :].tolist()


def asked(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def worker_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker


def tokens(output: Any) -> list[int]:
    assert output.error is None, output.error
    return list(output.outputs[0].token_ids)


def test_rows_of_the_tower_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    model, processor = oracle(folder)
    worker, image = worker_of(llm), picture(100, 70)
    spec = worker._loaded.spec.images
    tiles = make_tiles(spec, image, splits=True)
    rows, _ = worker._images.encode(tiles, torch.float32)
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


def test_answers_are_those_of_generate(llm: LLM, folder: Path) -> None:
    """Alone and in a batch with text; one image, several, and forms of the same one."""
    first, second = picture(100, 70), picture(30, 90, seed=1)
    prompts: list[Any] = [
        asked(f"Look: {IMAGE} What?", first),
        "Only text here.",
        asked(f"{IMAGE}{IMAGE} Compare.", second, first),
        asked(f"{IMAGE}", second.convert("L")),
        asked(f"Look: {IMAGE} What?", as_bytes(first)),
    ]
    images = [[first], [], [second, first], [second.convert("L").convert("RGB")], [first]]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, given, output in zip(prompts, images, together, strict=True):
        wanted = generated(folder, list(output.prompt_token_ids), given)
        assert tokens(output) == wanted
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert tokens(alone) == wanted
        streamed = [list(each.outputs[0].token_ids) for each in llm.stream(prompt, GREEDY)]
        assert streamed[-1] == wanted


def test_paths_and_chats(llm: LLM, folder: Path, tmp_path: Path) -> None:
    image = picture(50, 60)
    image.save(tmp_path / "a.png")
    text = f"User:{IMAGE}What?<end_of_utterance>\nAssistant:"
    wanted = tokens(*llm.generate(asked(text, image), GREEDY, use_tqdm=False))
    for given in (tmp_path / "a.png", str(tmp_path / "a.png")):
        assert tokens(*llm.generate(asked(text, given), GREEDY, use_tqdm=False)) == wanted
    bare = llm.engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
    given_ids = {"prompt_token_ids": bare, "multi_modal_data": {"image": image}}
    wanted = tokens(*llm.generate(given_ids, GREEDY, use_tqdm=False))
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
        assert tokens(found) == wanted


def data_url(image: Image.Image) -> str:
    import base64

    return "data:image/png;base64," + base64.b64encode(as_bytes(image)).decode()


def test_low_detail_takes_one_tile(llm: LLM) -> None:
    url = {"url": data_url(picture(100, 70)), "detail": "low"}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    (found,) = llm.chat(messages, GREEDY, use_tqdm=False)
    ids = list(found.prompt_token_ids)
    image_id = worker_of(llm)._loaded.spec.images.token_id
    assert ids.count(image_id) == TOKENS_PER_TILE


def test_whole_is_chunked_at_every_cut(folder: Path) -> None:
    """Chunks that begin and end at each place around the image, in it and between its tiles."""
    prompt = asked(f"So {IMAGE} it", picture(60, 20))
    with LLM(str(folder), **SETTINGS) as whole:
        (found,) = whole.generate(prompt, GREEDY, use_tqdm=False)
    for size in (1, 2, 3, 5, 7, 11, 13):
        chunked = {**SETTINGS, "max_num_batched_tokens": size, "max_num_seqs": 1}
        with LLM(str(folder), **chunked) as engine:
            (cut,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        assert tokens(cut) == tokens(found)


def test_a_second_turn_neither_encodes_nor_prefills_the_image(llm: LLM) -> None:
    image, worker = picture(80, 90, seed=7), worker_of(llm)
    start = f"User:{IMAGE}What?<end_of_utterance>\nAssistant:"
    before = worker._images.num_encoded
    (first,) = llm.generate(asked(start, image), GREEDY, use_tqdm=False)
    assert worker._images.num_encoded == before + 1
    following = start + first.outputs[0].text + "<end_of_utterance>\nUser:And?"
    (second,) = llm.generate(asked(following, image), GREEDY, use_tqdm=False)
    assert worker._images.num_encoded == before + 1
    image_end = max(
        index
        for index, token in enumerate(first.prompt_token_ids)
        if token == worker._loaded.spec.images.token_id
    )
    assert second.num_cached_tokens >= image_end // 16 * 16
    other = picture(80, 90, seed=8)
    (third,) = llm.generate(asked(start, other), GREEDY, use_tqdm=False)
    assert list(third.prompt_token_ids) == list(first.prompt_token_ids)
    assert third.num_cached_tokens < 16
    assert worker._images.num_encoded == before + 2


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


def test_a_text_that_spells_the_token_is_text(llm: LLM) -> None:
    """Fault: what a user writes takes the place of an image."""
    parts = [
        {"type": "text", "text": f"What is {IMAGE}?"},
        {"type": "image_pil", "image_pil": picture(20, 20)},
        {"type": "text", "text": f"{IMAGE}<fake_token_around_image>"},
    ]
    (found,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    ids = list(found.prompt_token_ids)
    image_id = worker_of(llm)._loaded.spec.images.token_id
    assert ids.count(image_id) == TOKENS_PER_TILE * 10
    (bare,) = llm.chat([{"role": "user", "content": f"a {IMAGE}"}], GREEDY, use_tqdm=False)
    assert image_id not in list(bare.prompt_token_ids)


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


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_language_model_in_few_bits(folder: Path, quantization: str) -> None:
    """The tower stays as it is: rows are equal, and answers do not depend on the batch."""
    prompt = asked(f"See {IMAGE} now", picture(60, 40))
    with LLM(str(folder), **SETTINGS, quantization=quantization) as engine:
        (alone,) = engine.generate(prompt, GREEDY, use_tqdm=False)
        batch = engine.generate([prompt, "text", prompt], GREEDY, use_tqdm=False)
    assert [tokens(batch[0]), tokens(batch[2])] == [tokens(alone)] * 2


def test_text_alone_by_a_limit_of_no_images(folder: Path, llm: LLM) -> None:
    with LLM(str(folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as engine:
        assert worker_of(engine)._loaded.tower is None
        (found,) = engine.generate("Only text.", GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="takes text only"):
            engine.generate(asked(IMAGE, picture(9, 9)), GREEDY, use_tqdm=False)
    assert tokens(found) == tokens(*llm.generate("Only text.", GREEDY, use_tqdm=False))


def test_after_a_sleep_images_are_read_again(folder: Path) -> None:
    prompt = asked(f"See {IMAGE} now", picture(60, 40))
    with LLM(str(folder), **SETTINGS) as engine:
        wanted = tokens(*engine.generate(prompt, GREEDY, use_tqdm=False))
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            assert tokens(*engine.generate(prompt, GREEDY, use_tqdm=False)) == wanted


def test_preempted_requests_keep_their_images(folder: Path) -> None:
    """A pool that holds less than two of them."""
    prompts = [asked(f"See {IMAGE} now", picture(60, 40, seed=i)) for i in range(4)]
    longer = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as engine:
        wanted = [tokens(each) for each in engine.generate(prompts, longer, use_tqdm=False)]
    small = {**SETTINGS, "num_kv_blocks": 12, "max_model_len": 160}
    with LLM(str(folder), **small) as engine:
        found = [tokens(each) for each in engine.generate(prompts, longer, use_tqdm=False)]
    assert found == wanted


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
