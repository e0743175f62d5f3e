"""Images of requests in another process: encoded beside steps, and given to the next core too."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests import waiting
from tests.engine.process_harness import Collected, collect, hosted, run, until_idle, until_state
from tests.image_writer import IMAGE, picture, write_vision_checkpoint

from quire import LLM, SamplingParams
from quire.base.errors import EngineUnavailableError, RequestError
from quire.config.settings import EngineSettings, setting_values
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.core.client_table import ConnectedClient
from quire.engine.core.media_intake import MediaIntake
from quire.protocol import EngineRequest, FinishReason
from quire.protocol.media import ImageTiles, Media, MediaInfo
from quire.protocol.messages import PutMedia
from quire.protocol.status import EngineState
from quire.text.rendering import RenderedPrompt

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quiet": True,
    "num_kv_blocks": 128,
    "max_model_len": 512,
}
TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def known(folder: Path) -> tuple[list[RenderedPrompt], list[list[int]]]:
    """Prompts with an image, and the answers of an engine in this process."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts: list[Any] = [
        {"prompt": f"See {IMAGE}", "multi_modal_data": {"image": picture(60, 40, seed=i)}}
        for i in range(3)
    ]
    with LLM(str(folder), **SETTINGS) as llm:
        rendered = [llm.engine.renderer.render_prompt(prompt) for prompt in prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return rendered, [list(each.outputs[0].token_ids) for each in outputs]


def settings_of(folder: Path) -> Any:
    return setting_values(EngineSettings(model=str(folder), **SETTINGS))


async def put(client: ProcessEngineClient, prompt: RenderedPrompt) -> tuple[Media, ...]:
    (part,) = prompt.parts
    assert isinstance(part.data, ImageTiles)
    handle = client.reserve_handles(1)
    return part.placed(await client.put_media(handle, part.data), handle).media


async def answer(
    client: ProcessEngineClient, prompt: RenderedPrompt, media: tuple[Media, ...]
) -> Collected:
    request = EngineRequest(
        request_id="test",
        first_handle=client.reserve_handles(1),
        prompt_token_ids=np.array(prompt.token_ids, np.int32),
        params=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        seed=0,
        media=media,
    )
    return await collect(await client.add(request))


def test_streams_go_on_when_the_core_is_killed(
    folder: Path, known: tuple[list[RenderedPrompt], list[list[int]]]
) -> None:
    """While images are encoded, between an image and its request, and while requests run: each
    answer is that of an engine that nobody kills."""
    prompts, wanted = known

    async def work() -> None:
        async with hosted(settings=settings_of(folder), max_replays=5) as host:
            client = host.client
            media = [await put(client, prompt) for prompt in prompts]
            pairs = list(zip(prompts, media, strict=True))
            early = [asyncio.ensure_future(answer(client, *pair)) for pair in pairs[:2]]
            await asyncio.sleep(0.05)
            # The next core encodes the images of both again, beside this one.
            coming = asyncio.ensure_future(put(client, prompts[2]))
            os.kill(host.supervisor.pid, signal.SIGKILL)
            await until_state(client, EngineState.RESTARTING)
            again = await coming
            await until_state(client, EngineState.READY)
            late = [await answer(client, prompts[2], each) for each in (media[2], again)]
            found = [*await asyncio.gather(*early), *late]
            for each, tokens in zip(found, [*wanted, wanted[2]], strict=True):
                assert each.finishes[0].reason is FinishReason.LENGTH
                assert each.tokens[0] == tokens
            client.drop_media([each[0].span.handle for each in [*media, again]])
            await until_idle(client)

    run(work())


def test_an_image_survives_as_many_cores_as_a_request(folder: Path) -> None:
    """Fault: an image that ends the core would end each core after it."""
    tiles = ImageTiles(bytes(3 * 28 * 28), 1, 28, 28)

    async def work() -> None:
        async with hosted(settings=settings_of(folder), max_replays=0) as host:
            client = host.client
            coming = asyncio.ensure_future(client.put_media(client.reserve_handles(1), tiles))
            os.kill(host.supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailableError, match="died before it answered"):
                await coming
            assert not client._media

    run(work())


def test_an_image_that_fails_ends_nothing_else(
    folder: Path, known: tuple[list[RenderedPrompt], list[list[int]]]
) -> None:
    prompts, wanted = known

    async def work() -> None:
        async with hosted(settings=settings_of(folder)) as host:
            client = host.client
            media = await put(client, prompts[0])
            running = asyncio.ensure_future(answer(client, prompts[0], media))
            for bad in (ImageTiles(b"x" * 7, 1, 28, 28), ImageTiles(b"x" * 300, 1, 10, 10)):
                with pytest.raises(RequestError, match="does not take such tiles"):
                    await client.put_media(client.reserve_handles(1), bad)
            with pytest.raises(RequestError, match="takes no embeddings"):
                await client.put_media(client.reserve_handles(1), b"x" * 100)
            assert (await running).tokens[0] == wanted[0]

    run(work())


def test_what_is_dropped_while_it_is_encoded_is_not_kept(
    folder: Path, known: tuple[list[RenderedPrompt], list[list[int]]]
) -> None:
    """Also the client's own wait may end, as when whoever asked is gone."""
    prompts, wanted = known

    async def work() -> None:
        async with hosted(settings=settings_of(folder)) as host:
            client = host.client
            waits = [asyncio.ensure_future(put(client, each)) for each in prompts]
            await asyncio.sleep(0)
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
            assert not client._media
            media = await put(client, prompts[1])
            assert (await answer(client, prompts[1], media)).tokens[0] == wanted[1]

    run(work())


class HeldCore:
    """Encodes images once it may."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.started, self.may_end = threading.Event(), threading.Event()

    def put_media(self, handle: int, _data: object) -> MediaInfo:
        self.begun.append(handle)
        self.started.set()
        assert self.may_end.wait(60)
        return MediaInfo(1, b"")


def test_images_of_nobody_are_not_encoded() -> None:
    """Fault: a client that sends many images and leaves keeps the encoder from others."""
    core = HeldCore()
    intake = MediaIntake(cast("Any", core), lambda: None)
    gone, other = ConnectedClient(0, b"gone"), ConnectedClient(1, b"other")
    with intake:
        for handle in range(3):
            intake.put(gone, PutMedia(handle, handle, ImageTiles(b"", 1, 28, 28)))
        assert core.started.wait(60)
        intake.put(other, PutMedia(3, 3, ImageTiles(b"", 1, 28, 28)))
        intake.cancel(gone, range(3))
        assert not gone.coming and other.coming == {3}
        core.may_end.set()
        ended: set[int] = set()

        def have_ended() -> bool:
            ended.update(each.handle for each in intake.take_ended())
            return 3 in ended

        waiting.wait_for(have_ended, "end of the other's image")
        assert core.begun == [0, 3] and ended == {0, 3} and not intake.is_busy


def test_images_of_batches_are_encoded_last() -> None:
    """Fault: an image of a person waits for all images of a batch that came before."""
    core = HeldCore()
    intake, client = MediaIntake(cast("Any", core), lambda: None), ConnectedClient(0, b"one")
    tiles = ImageTiles(b"", 1, 28, 28)
    with intake:
        for handle, is_spare in enumerate((True, True, True, False, True, False)):
            intake.put(client, PutMedia(handle, handle, tiles, is_spare))
            assert core.started.wait(60)
        core.may_end.set()
        waiting.wait_for(lambda: len(core.begun) == 6, "all images")
    assert core.begun == [0, 3, 5, 1, 2, 4]


def test_images_that_wait_are_not_encoded_at_the_end() -> None:
    core = HeldCore()
    intake, client = MediaIntake(cast("Any", core), lambda: None), ConnectedClient(0, b"one")
    with intake:
        for handle in range(3):
            intake.put(client, PutMedia(handle, handle, ImageTiles(b"", 1, 28, 28)))
        assert core.started.wait(60)

        def end_once_told() -> None:
            waiting.wait_for(lambda: intake._encoder._jobs.qsize() == 3, "the word to end")
            core.may_end.set()

        ending = threading.Thread(target=end_once_told)
        ending.start()
    ending.join()
    assert core.begun == [0]


def test_rows_must_be_as_many_as_places(
    known: tuple[list[RenderedPrompt], list[list[int]]],
) -> None:
    from quire.base.errors import EngineError

    (part,) = known[0][0].parts
    with pytest.raises(EngineError, match="rows; this is a bug"):
        part.placed(MediaInfo(3, b""), 0)
