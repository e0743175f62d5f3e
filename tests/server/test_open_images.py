"""Images of open requests stay within a bound; requests beyond it wait, and none waits forever."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from quire import LLM
from quire.config.settings import EngineSettings
from quire.config.startup import find_model
from quire.engine.model_front import load_model_front
from quire.server.generation.open_images import SPARE_SHARE, OpenImages
from quire.server.requests.errors import RefusedError
from tests import waiting
from tests.image_writer import data_url, picture, write_qwen_checkpoint
from tests.profiles import seeds
from tests.server.in_memory import RealClient
from tests.server.running import running_server


@pytest.mark.parametrize("seed", seeds(20))
def test_the_bound_holds_and_all_come_in_turn(seed: int) -> None:
    """Some give up while they wait, or in the moment in which they are let in."""
    chance = random.Random(seed)
    most = 100

    async def work() -> None:
        images, entered = OpenImages(), (list[int](), list[int]())
        spare_sizes: list[int] = []

        async def request(number: int, size: int, is_spare: bool) -> None:
            await images.enter(size, 0, most, 60.0, is_spare=is_spare)
            entered[is_spare].append(number)
            assert images.num_bytes <= most
            if is_spare:
                spare_sizes.append(size)
                assert len(spare_sizes) == 1 or sum(spare_sizes) <= most // SPARE_SHARE
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                if is_spare:
                    spare_sizes.remove(size)
                images.leave(size, is_spare=is_spare)

        sizes = [(chance.choice((1, 30, 60, 100)), chance.random() < 0.3) for _ in range(40)]
        tasks = [asyncio.ensure_future(request(i, *each)) for i, each in enumerate(sizes)]
        for _ in range(30):
            await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}
        for of_kind in entered:
            assert of_kind == sorted(of_kind), "in the order of arrival"
        assert images.num_bytes == images._asked.num_held == images._spare.num_held == 0
        assert not (images._asked.waiting or images._spare.waiting)

    asyncio.run(work())


def test_what_never_fits_and_what_waits_too_long_is_refused() -> None:
    async def work() -> None:
        images = OpenImages(num_fronts=2)
        with pytest.raises(RefusedError, match=r"take 51 bytes .* may take 50 \(image_memory\)"):
            await images.enter(51, 40, 100, 1.0)
        await images.enter(50, 40, 100, 1.0)
        with pytest.raises(RefusedError, match=r"image_memory for 0\.01 s") as error:
            await images.enter(1, 1, 100, 0.01)
        assert error.value.status == 503
        images.leave(50)
        await images.enter(50, 40, 100, 0.01)

    asyncio.run(work())


def test_what_waits_is_bounded_too() -> None:
    """Fault: pixels of any number of requests lie in memory while they wait for room."""

    async def work() -> None:
        images = OpenImages()
        await images.enter(90, 60, 100, 60.0)
        first = asyncio.ensure_future(images.enter(90, 60, 100, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="requests that wait take as much") as error:
            await images.enter(60, 41, 100, 60.0)
        assert error.value.status == 503
        second = asyncio.ensure_future(images.enter(60, 40, 100, 60.0))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        images.leave(90)
        await first
        third = asyncio.ensure_future(images.enter(100, 100, 100, 60.0))
        await asyncio.sleep(0)
        images.leave(90)
        await third

    asyncio.run(work())


def test_batches_leave_room_to_wait() -> None:
    """Fault: images of a batch that wait take the place of those that people could wait with."""

    async def work() -> None:
        images = OpenImages()
        await images.enter(90, 0, 100, 60.0)
        batch = [asyncio.ensure_future(images.enter(30, 30, 100, 60.0, is_spare=True))]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="requests that wait take as much"):
            await images.enter(30, 30, 100, 60.0, is_spare=True)
        person = asyncio.ensure_future(images.enter(60, 60, 100, 60.0))
        await asyncio.sleep(0)
        assert not person.done()
        images.leave(90)
        await asyncio.gather(person, *batch)

    asyncio.run(work())


def test_batches_let_others_pass() -> None:
    """Faults: images of a batch fill the memory until its requests end, or wait in front."""

    async def work() -> None:
        images, order = OpenImages(), list[str]()

        async def enter(name: str, size: int, *, is_spare: bool) -> None:
            await images.enter(size, 0, 100, 60.0, is_spare=is_spare)
            order.append(name)

        batch = [asyncio.ensure_future(enter(f"batch {i}", 30, is_spare=True)) for i in range(3)]
        await asyncio.sleep(0)
        assert order == ["batch 0"], "half of the memory is for others"
        await enter("person 0", 60, is_spare=False)
        people = [asyncio.ensure_future(enter(f"person {i}", 60, is_spare=False)) for i in (1, 2)]
        await asyncio.sleep(0)
        images.leave(30, is_spare=True)
        await asyncio.sleep(0)
        assert order == ["batch 0", "person 0"], "the batch does not pass those who wait"
        for _ in range(3):
            images.leave(60)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert order == ["batch 0", "person 0", "person 1", "person 2", "batch 1"]
        images.leave(30, is_spare=True)
        await asyncio.gather(*batch, *people)

    asyncio.run(work())


def test_an_image_of_a_batch_may_be_large() -> None:
    async def work() -> None:
        images = OpenImages()
        await images.enter(100, 100, 100, 0.01, is_spare=True)
        with pytest.raises(RefusedError, match="may take 100"):
            await images.enter(101, 0, 100, 1.0, is_spare=True)

    asyncio.run(work())


def test_requests_wait_for_the_images_of_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With room for one image and the pixels of two that wait; two are larger than that alone."""
    folder = write_qwen_checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")
    room = 60 * (8 * 8 * 3 + 32 * 4)  # an image has 40 tokens
    given: Any = {"model": str(folder), "dtype": "float32", "image_memory": room}
    settings = EngineSettings(**given)
    found = find_model(settings)
    front = load_model_front(settings, found.folder, found.spec)

    def body(*sizes: int) -> dict[str, Any]:
        urls = [{"url": data_url(picture(60, 40, seed=size))} for size in sizes]
        parts = [{"type": "image_url", "image_url": url} for url in urls]
        message = {"role": "user", "content": parts}
        return {"model": "bundled", "messages": [message], "max_tokens": 8, "ignore_eos": True}

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
            bodies = [body(1), body(2), body(3), body(4, 5)]
            asked = (client.post("/v1/chat/completions", json=each) for each in bodies)
            return list(await asyncio.gather(*asked))

    with LLM(**given, quiet=True, num_kv_blocks=64, max_model_len=256) as llm:
        client = RealClient(llm)
        with running_server(front, client=client) as served:
            *good, bad = asyncio.run(ask(served.url))
            served.wait_until_idle()
        worker: Any = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
        waiting.wait_for(lambda: not worker._media._rows, "end of the images")
    assert [each.status_code for each in good] == [200] * 3
    assert bad.status_code == 400
    assert f"may take {room:,} (image_memory)" in bad.json()["error"]["message"]
