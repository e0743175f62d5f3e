"""Pinned prefixes and open prompts of a core in a process of its own."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import EngineUnavailableError, RequestError
from quire.base.telemetry.flight.record import RING_PREFIX, Doing, read_record
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.request_stream import RequestStream
from quire.engine.core.in_flight import read_in_flight
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.control import ListPins, Unpin
from quire.protocol.messages import HANDLES_PER_CLIENT
from quire.protocol.status import EngineState
from tests.engine.fake_core_process import FakeCoreOptions
from tests.engine.process_harness import (
    FAKE_MODEL,
    ask,
    collect,
    hosted,
    run,
    until_idle,
    until_state,
)

PREFIX = list(range(40, 63))  # five blocks of four and a tail of three
PROMPT = list(range(100, 170))


async def pin(client: ProcessEngineClient, name: str = "manual", **options) -> int:
    """The handle of a pin that is held."""
    request = EngineRequest(
        name,
        client.reserve_handles(1),
        np.array(PREFIX, np.int32),
        SamplingParams(max_tokens=1),
        0,
        **{"pin_seconds": math.inf, **options},
    )
    found = await collect(await client.add(request))
    assert found.finishes[0].reason is FinishReason.LENGTH
    return request.first_handle


async def num_cached(client: ProcessEngineClient, prompt: list[int]) -> int:
    async with await ask(client, prompt, max_tokens=3) as stream:
        return (await anext(stream)).num_cached_tokens


async def open_prompt(
    client: ProcessEngineClient, given: list[int], max_tokens: int = 8
) -> RequestStream:
    return await client.add(
        EngineRequest(
            "in pieces",
            client.reserve_handles(1),
            np.array(given, np.int32),
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            is_open=True,
        )
    )


def extend(
    client: ProcessEngineClient, stream: RequestStream, piece: list[int], *, is_last: bool = False
) -> None:
    handle = stream.request.first_handle
    client.extend(handle, np.array(piece, np.int32), is_last=is_last)


async def until_computed(client: ProcessEngineClient, num_steps: int) -> None:
    while client.stats.steps_total < num_steps:
        await asyncio.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_any_client_sees_a_pin_and_lets_it_go() -> None:
    """It stays when the one that made it leaves."""

    async def work() -> None:
        async with hosted() as host:
            other = ProcessEngineClient(host.directory, client_id=1)
            await until_state(other, EngineState.READY)
            handle = await pin(other, "policy.txt")
            assert handle == HANDLES_PER_CLIENT
            await other.close()
            (held,) = (await host.client.control(ListPins())).pins
            assert (held.name, held.num_tokens, held.num_blocks) == ("policy.txt", 23, 6)
            assert (held.seconds_left, held.is_shared, held.tenant) == (math.inf, False, "")
            assert await num_cached(host.client, [*PREFIX, 7]) == 23
            assert (await host.client.control(ListPins())).pins[0].hits == 1
            assert (await host.client.control(Unpin(handle))).was_there
            assert not (await host.client.control(Unpin(handle))).was_there
            assert (await host.client.control(ListPins())).pins == ()
            await until_idle(host.client)

    run(work())


def test_a_question_is_answered_or_fails() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.2)) as host:
            stream = await ask(host.client, [1], max_tokens=500)
            await anext(stream)
            os.kill(host.supervisor.pid, signal.SIGSTOP)  # it does not come to the question
            question = asyncio.ensure_future(host.client.control(ListPins()))
            await asyncio.sleep(0.1)
            assert not question.done()
            os.kill(host.supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailableError, match="before it answered"):
                await question
            stream.abort()
            with pytest.raises(EngineUnavailableError):
                await host.client.control(Unpin(3))
            await until_state(host.client, EngineState.READY)
            assert (await host.client.control(ListPins())).pins == ()

    run(work())


def test_a_prompt_in_pieces_is_the_whole_prompt() -> None:
    async def work() -> None:
        async with hosted() as host:
            stream = await open_prompt(host.client, PROMPT[:1])
            for start in range(1, 70, 23):
                await asyncio.sleep(0.05)
                extend(host.client, stream, PROMPT[start : start + 23])
            assert host.client.awaits_prompt(stream.request.first_handle)
            extend(host.client, stream, [], is_last=True)
            assert not host.client.awaits_prompt(stream.request.first_handle)
            with pytest.raises(RequestError, match="has ended"):
                extend(host.client, stream, [3])
            found = await collect(stream)
            assert found.tokens[0] == FAKE_MODEL.expected_tokens(PROMPT, 8, 0)
            extend(host.client, stream, [3])  # it has ended, so that is ignored
            await until_idle(host.client)

    run(work())


def test_a_core_sleeps_while_all_prompts_wait_for_their_clients() -> None:
    async def work() -> None:
        async with hosted() as host:
            streams = [await open_prompt(host.client, [i, *PROMPT[:20]]) for i in range(3)]
            await until_computed(host.client, 1)
            await asyncio.sleep(0.2)
            before = cpu_seconds(host.supervisor.pid)
            await asyncio.sleep(1.5)
            assert cpu_seconds(host.supervisor.pid) - before < 0.4
            for i, stream in enumerate(streams):
                extend(host.client, stream, [5], is_last=True)
                found = await collect(stream)
                prompt = [i, *PROMPT[:20], 5]
                assert found.tokens[0] == FAKE_MODEL.expected_tokens(prompt, 8, 0)
            assert host.client.status.restarts == 0

    run(work())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2])
def test_an_open_prompt_goes_on_in_the_next_core(number: signal.Signals) -> None:
    """Also one that grows while there is no core; and nobody is charged with the death."""

    async def work() -> None:
        async with hosted(max_replays=0) as host:
            stream = await open_prompt(host.client, PROMPT[:30])
            extend(host.client, stream, PROMPT[30:50])
            await host.client.control(ListPins())  # it has all that was sent
            ring = host.directory / f"{RING_PREFIX}0"
            while read_record(ring.read_bytes()).doing is not Doing.IDLE:
                await asyncio.sleep(0.01)
            assert not read_in_flight(host.directory, 0), "it would be charged with the death"
            os.kill(host.supervisor.pid, number)
            while host.client.status.restarts == 0 and host.client._watch.instance is not None:
                await asyncio.sleep(0.005)
            extend(host.client, stream, PROMPT[50:60])
            await until_state(host.client, EngineState.READY)
            extend(host.client, stream, PROMPT[60:], is_last=True)
            found = await collect(stream)
            assert found.tokens[0] == FAKE_MODEL.expected_tokens(PROMPT, 8, 0)
            await until_idle(host.client)

    run(work())


def test_a_client_that_vanishes_frees_its_open_prompt() -> None:
    """Without a word, and although the core has nothing to send to it."""

    async def work() -> None:
        async with hosted() as host:
            other = ProcessEngineClient(host.directory, client_id=1)
            await until_state(other, EngineState.READY)
            await open_prompt(other, PROMPT[:40])
            while host.client.stats.num_used_blocks == 0:
                await asyncio.sleep(0.02)
            connection = other._connection
            connection.close = lambda **_: type(connection).close(connection, say_goodbye=False)
            await other.close()
            await until_idle(host.client)
            assert host.client.stats.aborted_total == 1

    run(work())


def test_a_prompt_that_grows_too_long_is_refused_and_an_abort_ends_one_that_waits() -> None:
    async def work() -> None:
        async with hosted(max_message_bytes=3000) as host:
            long = await open_prompt(host.client, PROMPT)
            waiting = await open_prompt(host.client, PROMPT[:1])
            with pytest.raises(RequestError, match="may be sent"):
                extend(host.client, long, [1] * 800)
            extend(host.client, long, [1] * 200)
            with pytest.raises(RequestError, match="270 tokens, but may have 248"):
                await collect(long)
            assert not host.client.awaits_prompt(long.request.first_handle)
            assert host.client.awaits_prompt(waiting.request.first_handle)
            waiting.abort()
            assert not host.client.awaits_prompt(waiting.request.first_handle)
            assert (await collect(waiting)).finishes[0].reason is FinishReason.ABORT
            await until_idle(host.client)
            whole = await collect(await ask(host.client, PROMPT[:3], max_tokens=3))
            assert whole.tokens[0] == FAKE_MODEL.expected_tokens(PROMPT[:3], 3, 0)

    run(work())
