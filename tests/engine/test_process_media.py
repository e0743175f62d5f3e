"""Media of requests in another process: they survive the core that had them, and end with their
request."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from quire.base.errors import EngineUnavailableError, RequestError
from quire.bundled import bundled_model_path
from quire.config import read_model_spec
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.request_stream import RequestStream
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.media import Media
from quire.protocol.status import EngineState
from quire.protocol.step import MediaSpan
from tests.engine.fake_core_process import KILLER, FakeCoreOptions
from tests.engine.process_harness import (
    FAKE_MODEL,
    ask,
    collect,
    hosted,
    run,
    until_idle,
    until_state,
)
from tests.engine.test_replicas import clients_of, replicas

WORDS = [2**40 + i for i in range(50)]


async def put(client: ProcessEngineClient, words: Sequence[int]) -> Media:
    handle = client.reserve_handles(1)
    info = await client.put_media(handle, np.array(words, np.uint64).tobytes())
    return Media(info.digest, MediaSpan(0, info.num_tokens, handle))


async def ask_media(
    client: ProcessEngineClient, media: Media, *, seed: int = 0, max_tokens: int = 8, n: int = 1
) -> RequestStream:
    return await client.add(
        EngineRequest(
            request_id="test",
            first_handle=client.reserve_handles(n),
            prompt_token_ids=np.zeros(media.span.length, np.int32),
            params=SamplingParams(max_tokens=max_tokens, n=n),
            seed=seed,
            media=(media,),
        )
    )


def test_replays_are_given_their_media_again() -> None:
    """The core is killed while requests run, and between the media and a request."""

    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.005), max_replays=5) as host:
            client = host.client
            media = [await put(client, WORDS[i:]) for i in range(4)]
            early = [
                asyncio.ensure_future(
                    collect(await ask_media(client, each, seed=i, max_tokens=60, n=1 + i % 2))
                )
                for i, each in enumerate(media[:3])
            ]
            for _ in range(2):
                await asyncio.sleep(0.1)
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(client, EngineState.RESTARTING)
                await until_state(client, EngineState.READY)
            late = await collect(await ask_media(client, media[3], seed=3, max_tokens=60))
            for i, found in enumerate([*(await asyncio.gather(*early)), late]):
                assert {f.reason for f in found.finishes.values()} == {FinishReason.LENGTH}
                for sample, tokens in found.tokens.items():
                    assert tokens == FAKE_MODEL.expected_tokens(WORDS[i:], 60, i, sample)
            client.drop_media([each.span.handle for each in media])
            assert not client._media
            await until_idle(client)

    run(work())


def test_a_suspect_is_given_its_media_for_its_trial() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.002, fault_after=3), max_replays=1) as host:
            client = host.client
            media = await put(client, WORDS)
            good = asyncio.ensure_future(
                collect(await ask_media(client, media, seed=1, max_tokens=100))
            )
            await asyncio.sleep(0.05)
            poison = await collect(await ask(client, [5, KILLER, 7], max_tokens=50))
            assert poison.finishes[0].reason is FinishReason.ERROR
            assert (await good).tokens[0] == FAKE_MODEL.expected_tokens(WORDS, 100, 1)

    run(work())


def test_what_the_core_cannot_use_is_refused_and_not_kept() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(), max_message_bytes=4096) as host:
            client = host.client
            with pytest.raises(RequestError, match="8 bytes"):
                await client.put_media(client.reserve_handles(1), b"abc")
            with pytest.raises(RequestError, match="4096 may be sent"):
                await put(client, [1] * 512)
            assert not client._media
            media = await put(client, WORDS)
            client.drop_media([media.span.handle])
            with pytest.raises(RequestError, match="embeddings"):
                await collect(await ask_media(client, media))
            again = await collect(await ask(client, [8], max_tokens=3))
            assert again.tokens[0] == FAKE_MODEL.expected_tokens([8], 3, 0)
            await until_idle(client)

    run(work())


def test_media_of_another_client_are_out_of_reach() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions()) as host:
            media = await put(host.client, WORDS)
            stranger = ProcessEngineClient(host.client._directory, client_id=7)
            try:
                await until_state(stranger, EngineState.READY)
                with pytest.raises(RequestError, match="embeddings"):
                    await collect(await ask_media(stranger, media))
            finally:
                await stranger.close()

    run(work())


def test_a_real_core_reads_files() -> None:
    """The worker reports a wrong file, and nothing else fails."""
    path = bundled_model_path()
    width = read_model_spec(path).hidden_size
    settings = {
        "model": str(path),
        "enable_prompt_embeds": True,
        "num_kv_blocks": 64,
        "max_model_len": 64,
        "quiet": True,
    }

    async def work() -> None:
        async with hosted(settings=settings) as host:
            client = host.client
            with pytest.raises(RequestError, match="this model takes"):
                await client.put_media(client.reserve_handles(1), saved(torch.zeros(3, width + 1)))
            handle = client.reserve_handles(1)
            info = await client.put_media(handle, saved(torch.zeros(9, width)))
            assert info.num_tokens == 9
            media = Media(info.digest, MediaSpan(0, 9, handle))
            first, second = [await collect(await ask_media(client, media)) for _ in range(2)]
            assert first.tokens == second.tokens
            assert len(first.tokens[0]) == 8
            client.drop_media([handle])
            await until_idle(client)

    run(work())


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def test_no_core_takes_no_media() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(start_s=1.0), wait=False) as host:
            with pytest.raises(EngineUnavailableError):
                await put(host.client, WORDS)
            assert not host.client._media

    run(work())


def test_an_engine_that_is_ready_later_has_media_from_before() -> None:
    """Fault: media went to the replicas that were ready then, and a request to one that is now."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            first, second = clients_of(host)
            wanted = await collect(await ask_media(client, await put(client, WORDS), seed=1))
            os.kill(host.supervisors[1].pid or 0, signal.SIGKILL)
            await until_state(second, EngineState.RESTARTING)
            media = await put(client, WORDS)
            await until_state(second, EngineState.READY)
            found = await collect(await ask_media(second, media, seed=1))
            assert found.tokens == wanted.tokens
            client.drop_media([media.span.handle])
            assert all(media.span.handle not in each._media for each in (first, second))

    run(work())


def test_one_engine_of_two_dies_before_it_has_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the request fails, although the other one could serve it."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            first, second = clients_of(host)
            wanted = await collect(await ask_media(client, await put(client, WORDS), seed=1))
            ask = first._queries.ask

            async def killed(send: Any) -> Any:
                os.kill(host.supervisors[0].pid or 0, signal.SIGKILL)
                return await ask(lambda _: None)

            monkeypatch.setattr(first._queries, "ask", killed)
            media = await put(client, WORDS)
            monkeypatch.undo()
            for each in (second, first):
                await until_state(each, EngineState.READY)
                found = await collect(await ask_media(each, media, seed=1))
                assert found.tokens == wanted.tokens
            client.drop_media([media.span.handle])

    run(work())


def test_media_that_one_engine_refuses_wait_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the others are asked to forget them, and never answer the one that waits."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            first, second = clients_of(host)

            async def refuse(handle: int, data: object, *, is_spare: bool) -> NoReturn:
                raise RequestError("no")

            async def forgotten(send: object) -> NoReturn:
                await asyncio.Event().wait()
                raise AssertionError

            monkeypatch.setattr(first, "put_media_once", refuse)
            monkeypatch.setattr(second._queries, "ask", forgotten)
            before = asyncio.all_tasks()
            handle = client.reserve_handles(1)
            with pytest.raises(RequestError, match="no"):
                await client.put_media(handle, b"12345678")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() <= before
            assert handle not in second._media

    run(work())
