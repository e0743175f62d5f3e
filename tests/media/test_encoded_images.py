"""Images that come as rows of the encoder: the answers of the images themselves, or an error."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.image_oracle import GREEDY, SETTINGS, asked, tokens, worker_of
from tests.image_writer import QWEN_PATCH, as_bytes, picture
from tests.waiting import wait_for

from quire import LLM, RequestError
from quire.protocol.media import ImageRows


@pytest.fixture(scope="module")
def llm(kind_folder: Path) -> Iterator[LLM]:
    with LLM(str(kind_folder), **SETTINGS, enable_mm_embeds=True) as engine:
        yield engine


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def encoded(llm: LLM, low: bool) -> tuple[torch.Tensor, list[int]]:
    """Rows of an image, and its grid of patches."""
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "low" if low else "high"}}
    renderer = llm.engine.renderer
    messages, images = renderer.take_images([{"role": "user", "content": [part]}])
    (found,) = renderer.render_chat(messages, images=images).parts
    tiles: Any = found.data
    rows = worker_of(llm)._images.encode(tiles, torch.float32).rows
    return rows, [1, tiles.height // QWEN_PATCH, tiles.width // QWEN_PATCH]


URL = "data:;base64," + base64.b64encode(as_bytes(picture(60, 40))).decode()


def answer(llm: LLM, part: dict[str, Any]) -> list[int]:
    content = [part, {"type": "text", "text": "What?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    if output.error is not None:
        raise RequestError(output.error)
    return tokens(output)


def test_rows_are_answered_as_the_image(llm: LLM, kind: str, mark: str) -> None:
    """In parts of chats, whose tensors are files; and offline, as tensors."""
    is_qwen = kind.startswith("qwen")
    rows, grid = encoded(llm, low=not is_qwen)
    detail = "high" if is_qwen else "low"
    image = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
    wanted = answer(llm, image)
    data = saved(rows)
    forms: list[Any] = [data]
    if is_qwen:
        tensors = (torch.tensor([grid]), torch.tensor(grid, dtype=torch.int32))
        grids = [grid, [grid], *map(saved, tensors)]
        forms = [{"image_embeds": data, "image_grid_thw": each} for each in grids]
    encoder = worker_of(llm)._images
    before = encoder.num_encoded
    for form in forms:
        assert answer(llm, {"type": "image_embeds", "image_embeds": form}) == wanted
    given: Any = {"image_embeds": rows, "image_grid_thw": torch.tensor([grid])} if is_qwen else rows
    (output,) = llm.generate(asked(f"{mark} What?", given), GREEDY, use_tqdm=False)
    assert encoder.num_encoded == before
    if kind not in ("smolvlm", "idefics3"):  # these make tiles of an image that says no detail
        plain = asked(f"{mark} What?", picture(60, 40))
        assert tokens(output) == tokens(*llm.generate(plain, GREEDY, use_tqdm=False))
    assert len(tokens(output)) == 12


def test_what_is_refused(llm: LLM, kind: str) -> None:
    is_qwen = kind.startswith("qwen")
    rows, grid = encoded(llm, low=not is_qwen)
    width = rows.shape[1]

    def part(data: object, own: object = grid, **more: Any) -> dict[str, Any]:
        form = {"image_embeds": data, "image_grid_thw": own} if is_qwen else data
        return {"type": "image_embeds", "image_embeds": form, **more}

    cases = [
        (part(saved(rows[:-1])), rf"image_embeds has the shape \[{len(rows) - 1}, {width}\]"),
        (part(saved(rows[:, :-1])), rf"takes \[N, {width}\] with {len(rows)} rows"),
        (part(saved(rows * float("nan"))), "image_embeds has numbers that are not finite"),
        (part(base64.b64encode(b"x" * 4000).decode()), "image_embeds cannot be read"),
        (part("a b"), r"content\[0\]\.image_embeds is no base64"),
        (part(None), r"content\[0\]\.image_embeds is None: send the base64"),
        (part(saved(rows), uuid="a"), "image_embeds is given with uuid"),
        ({"type": "image_embeds"}, r"content\[0\]\.image_embeds is None: send the base64"),
    ]
    if is_qwen:
        text = r"content\[0\]\.image_embeds: image_grid_thw is "
        cases += [
            (part(saved(rows), None), "image_grid_thw is missing"),
            (part(saved(rows), [2, *grid[1:]]), text + r"\[2, "),
            (part(saved(rows), [1, 3, 2]), text + r"\[1, 3, 2\]"),
            (part(saved(rows), [1, 2**30, 2**30]), "has the grid"),
            (part(saved(rows), [1, 2]), r"image_embeds\.image_grid_thw is \[1, 2\]"),
            (part(saved(rows), [1, 2, -2]), r"image_embeds\.image_grid_thw is"),
            (part(saved(rows), saved(torch.zeros(30))), r"image_embeds\.image_grid_thw is"),
            (part(saved(rows), "x"), "is no base64"),
        ]
    else:
        form = {"image_embeds": saved(rows), "image_grid_thw": grid}
        more = {"type": "image_embeds", "image_embeds": form}
        cases.append((more, "this model has no grid: leave it out"))
    for bad, words in cases:
        with pytest.raises(RequestError, match=words):
            answer(llm, bad)
    wait_for(lambda: not worker_of(llm)._media._rows, "end of the images")


def test_rows_need_the_switch(kind_folder: Path, llm: LLM, kind: str) -> None:
    """In the front, and in the worker too."""
    rows, grid = encoded(llm, low=not kind.startswith("qwen"))
    form: Any = {"image_embeds": saved(rows), "image_grid_thw": grid}
    part = {
        "type": "image_embeds",
        "image_embeds": form if kind.startswith("qwen") else saved(rows),
    }
    with LLM(str(kind_folder), **SETTINGS) as other:
        with pytest.raises(RequestError, match="--enable-mm-embeds"):
            answer(other, part)
        with pytest.raises(RequestError, match="--enable-mm-embeds"):
            worker_of(other).put_media(0, ImageRows(b"", 1))
