"""Engines that are alike behind one client: the choice of one for a request, and the fate of
requests of an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.supervision import supervisor
from quire.engine.supervision.host import EngineHost, host_engine
from quire.engine.supervision.stall import StallLimits
from quire.protocol import FinishReason
from quire.protocol.control import Inspect, Pause, Resume
from quire.protocol.messages import Welcome
from quire.protocol.status import EngineState
from quire.server.generation.backend import describe
from tests.engine.fake_core_process import HANGER, KILLER, STOPPER, FakeCoreOptions
from tests.engine.process_harness import (
    ENDLESS,
    FAKE_MODEL,
    RESTART_AT_ONCE,
    Collected,
    ForkedSupervisor,
    ask,
    by_flags,
    collect,
    run,
    until_fresh,
    until_idle,
    until_state,
)
from tests.waiting import WAIT_S

SILENCE_S = 2.0
"""Silence after which a core counts as stalled where one is stopped: forty beats."""


@contextlib.asynccontextmanager
async def replicas(
    size: int = 2,
    *,
    fault_after: int = 2,
    make_options: Callable[..., FakeCoreOptions] = FakeCoreOptions,
    **client_options: Any,
) -> AsyncGenerator[EngineHost]:
    """Fake cores behind one client, all of them ready."""
    make_supervisor = partial(
        ForkedSupervisor,
        heartbeat_interval_s=0.05,
        stall_limits=StallLimits(min_s=60.0, start_silence_s=60.0),
        restart_policy=RESTART_AT_ONCE,
        command=make_options(step_s=0.005, fault_after=fault_after).command(),
    )
    async with host_engine(
        {"data_parallel_size": size},
        measure=by_flags,
        make_supervisor=make_supervisor,
        make_client=partial(ProcessEngineClient, **{"silence_s": WAIT_S, **client_options}),
    ) as host:
        await until_all_ready(host)
        yield host


def clients_of(host: EngineHost) -> tuple[ProcessEngineClient, ...]:
    client: Any = host.client
    return client._replicas


async def until_all_ready(host: EngineHost) -> None:
    for client in clients_of(host):
        while (status := client.status).state is not EngineState.READY:
            await client.wait_for_change(status)


@pytest.fixture
def ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that hang at the end of a test are killed, and not waited for."""
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.0)


def test_requests_go_to_the_least_busy_engine() -> None:
    """Turns red when a long request counts as much as a short one, or ties go to one engine."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            streams = [await ask(client, [1, 2], max_tokens=160)]
            streams += [await ask(client, [1, 2], max_tokens=20) for _ in range(6)]
            counts = sorted(each.num_unfinished for each in clients_of(host))
            assert counts == [1, 6]
            assert client.num_unfinished == 7
            for stream in streams:
                assert len((await collect(stream)).finishes) == 1
            for _ in range(4):
                await collect(await ask(client, [3], max_tokens=2))
            while client.stats.requests_total < 11:  # until a heartbeat has told
                await asyncio.sleep(0.01)
            totals = [each.stats.requests_total for each in clients_of(host)]
            assert sorted(totals) == [3, 8]

    run(work())


def test_requests_go_where_their_beginning_is_cached() -> None:
    """Turns red when each turn of a conversation is computed by another engine, or when an engine
    has much to do while one that lacks the beginning has nothing."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            prompt, holders = list(range(100)), []
            for turn in range(4):
                stream = await ask(client, prompt, max_tokens=2)
                holders.append([each.num_unfinished for each in clients_of(host)].index(1))
                await collect(stream)
                prompt += range(300 + turn, 320 + turn)
            assert len(set(holders)) == 1
            short = [await ask(client, [3], max_tokens=200) for _ in range(2)]
            assert [each.num_unfinished for each in clients_of(host)] == [1, 1]
            long = await ask(client, prompt, max_tokens=50)  # the other one has as much to do
            assert clients_of(host)[holders[0]].num_unfinished == 2
            other = await ask(client, prompt, max_tokens=2)
            assert [each.num_unfinished for each in clients_of(host)] == [2, 2]
            for stream in (*short, long, other):
                stream.abort()
                await collect(stream)

    run(work())


def test_requests_without_a_limit_are_spread() -> None:
    """Fault: each of their tokens made an engine look less busy, and it got all new requests."""

    async def work() -> None:
        async with replicas(make_options=FakeCoreOptions.endless) as host:
            client: Any = host.client
            for _ in range(6):
                stream = await ask(client, [1, 2], max_tokens=None)
                async for _ in stream:
                    break
            assert [each.num_unfinished for each in clients_of(host)] == [3, 3]
            assert all(each.tokens_in_flight > 0 for each in clients_of(host))

    run(work())


def test_streams_of_a_dead_engine_go_on_in_another_one() -> None:
    """kill -9 of either engine at random points: every stream has the tokens of an engine without
    faults, whichever engine ends it."""

    async def work() -> None:
        rng = random.Random(4)
        async with replicas(max_replays=8) as host:
            client: Any = host.client
            tasks: list[Any] = []
            wanted: list[dict[int, list[int]]] = []
            for i in range(20):
                prompt, n = [i, *range(rng.randrange(1, 30))], rng.choice([1, 1, 3])
                length = rng.randrange(20, 120)
                stream = await ask(client, prompt, seed=i, n=n, max_tokens=length)
                tasks.append(asyncio.ensure_future(collect(stream)))
                wanted.append(
                    {s: FAKE_MODEL.expected_tokens(prompt, length, i, s) for s in range(n)}
                )
            for i in range(3):
                await asyncio.sleep(rng.uniform(0.02, 0.2))
                lost = clients_of(host)[i % 2]
                os.kill(host.supervisors[i % 2].pid or 0, signal.SIGKILL)
                while (status := lost.status).state is not EngineState.RESTARTING:
                    await lost.wait_for_change(status)
                assert lost.num_unfinished == 0, "its streams are elsewhere"
                assert client.status.state is EngineState.READY
                await until_all_ready(host)
            for task, tokens in zip(tasks, wanted, strict=True):
                found = await task
                assert found.tokens == tokens
                assert {f.reason for f in found.finishes.values()} == {FinishReason.LENGTH}
            assert client.status.restarts == 3
            assert client.num_unfinished == 0

    run(work())


def test_a_request_that_kills_its_engine_does_not_go_round() -> None:
    """Turns red when a poisonous request is moved from engine to engine for ever."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            poison = await collect(await ask(client, [5, KILLER, 7], max_tokens=50))
            assert poison.finishes[0].reason is FinishReason.ERROR
            await until_all_ready(host)
            assert client.status.restarts == 3
            again = await collect(await ask(client, [8], max_tokens=3))
            assert again.tokens[0] == FAKE_MODEL.expected_tokens([8], 3, 0)

    run(work())


def test_readings_of_a_dead_engine_are_not_of_the_moment() -> None:
    """Fault: a request that had gone elsewhere was counted there too, until the next core's
    heartbeat."""

    async def work() -> None:
        async with replicas(make_options=FakeCoreOptions.endless) as host:
            client: Any = host.client
            streams = [await ask(client, [i, 3], max_tokens=ENDLESS) for i in range(4)]
            while client.stats.num_running < 4:
                await asyncio.sleep(0.01)
            before = clients_of(host)[0].stats
            os.kill(host.supervisors[0].pid or 0, signal.SIGKILL)
            await until_state(clients_of(host)[0], EngineState.RESTARTING)
            lost, stats = clients_of(host)[0].stats, client.stats
            assert stats.num_running + stats.num_waiting <= 4
            assert (lost.num_running, lost.num_waiting, lost.num_used_blocks) == (0, 0, 0)
            assert lost.requests_total == before.requests_total > 0, "counters stay"
            text = describe(clients_of(host)[0].status)
            assert re.fullmatch(r"restarting \(starting the engine core, \d\.\d s\)", text), text
            for stream in streams:
                stream.abort()

    run(work())


def test_aborts_reach_the_engine_that_has_the_stream_now() -> None:
    """Turns red when a moved stream still belongs to the client that it came from."""

    async def work() -> None:
        async with replicas(make_options=FakeCoreOptions.endless) as host:
            client: Any = host.client
            found = Collected()
            stream = await ask(client, [3, 4], max_tokens=ENDLESS)
            task = asyncio.ensure_future(collect(stream, found))
            while not found.tokens:
                await asyncio.sleep(0.01)
            index = next(i for i, each in enumerate(clients_of(host)) if each.num_unfinished)
            os.kill(host.supervisors[index].pid or 0, signal.SIGKILL)
            while not clients_of(host)[1 - index].num_unfinished:
                await asyncio.sleep(0.01)
            client.abort([stream.request.first_handle])
            await task
            assert found.finishes[0].reason is FinishReason.ABORT
            assert client.num_unfinished == 0
            other = clients_of(host)[1 - index]
            while other.stats.num_running or not other.stats.aborted_total:
                await asyncio.sleep(0.01)

    run(work())


@pytest.mark.parametrize("fatal", [None, HANGER])
@pytest.mark.usefixtures("ended_at_once")
def test_what_waits_for_a_hung_engine_goes_elsewhere(fatal: int | None) -> None:
    """It would wait until the engine is replaced, which takes a minute: one that is silent as a
    whole, or in one step. What has had tokens stays, and the engine forgets the rest."""

    async def work() -> None:
        limits: Any = {"silence_s": SILENCE_S, "stuck_step_s": SILENCE_S}
        async with replicas(make_options=FakeCoreOptions.endless, **limits) as host:
            client: Any = host.client
            hung, other = clients_of(host)
            stays = await ask(hung, [3, 4], max_tokens=ENDLESS)
            task = asyncio.ensure_future(collect(stays))
            while not stays.num_tokens:
                await asyncio.sleep(0.01)
            if fatal is None:
                os.kill(host.supervisors[0].pid or 0, signal.SIGSTOP)
            else:
                await ask(hung, [5, fatal, 7], max_tokens=50)
                while not hung.is_stuck:
                    await asyncio.sleep(0.01)
            waiting = [await ask(hung, [i, 9], n=1 + i % 2, max_tokens=20) for i in range(6)]
            for i, found in enumerate(await asyncio.gather(*map(collect, waiting))):
                expected = {
                    s: FAKE_MODEL.expected_tokens([i, 9], 20, 0, s) for s in range(1 + i % 2)
                }
                assert found.tokens == expected
            assert not task.done()
            assert other.num_unfinished == 0, "what hangs an engine does not go round"
            assert [hung.num_unfinished, client.status.state] == [
                1 if fatal is None else 2, EngineState.READY
            ]  # fmt: skip
            again = await ask(client, [8, 8], max_tokens=5)  # though the hung one has less to do
            assert (await collect(again)).tokens[0] == FAKE_MODEL.expected_tokens([8, 8], 5, 0)
            if fatal is None:
                had = stays.num_tokens
                os.kill(host.supervisors[0].pid or 0, signal.SIGCONT)
                while stays.num_tokens < had + 50:
                    await asyncio.sleep(0.01)
            stays.abort()
            tokens = (await task).tokens[0]
            assert tokens == FAKE_MODEL.expected_tokens([3, 4], len(tokens), 0)
            if fatal is None:
                await until_idle(hung)

    run(work())


@pytest.mark.usefixtures("ended_at_once")
def test_what_an_engine_computes_when_it_stops_goes_elsewhere_once() -> None:
    """Its request may be what stopped it, and must not stop one engine after the other."""

    async def work() -> None:
        async with replicas(3, fault_after=0, silence_s=SILENCE_S) as host:
            first, *others = clients_of(host)
            stream = await ask(first, [5, STOPPER, 7], max_tokens=50)
            while not (having := [each for each in others if each.num_unfinished]):
                await asyncio.sleep(0.01)
            await until_state(having[0], EngineState.STALLED)
            (last,) = {*others} - {*having}
            await until_fresh(last)
            assert [each.num_unfinished for each in (first, having[0], last)] == [0, 1, 0]
            assert host.client.status.state is EngineState.READY
            stream.abort()

    run(work())


def test_operations_and_readings_are_of_all_engines() -> None:
    async def work() -> None:
        async with replicas(3) as host:
            client: Any = host.client
            for i in range(6):
                await collect(await ask(client, [i], max_tokens=2))
            await client.control(Inspect())
            while client.stats.requests_total < 6:
                await asyncio.sleep(0.01)
            assert client.stats.num_blocks == 3 * clients_of(host)[0].stats.num_blocks

    run(work())


def test_the_capacity_is_of_all_engines_that_are_ready() -> None:
    """Turns red when a front lets in what one engine can serve, or counts one that is gone."""

    async def work() -> None:
        async with replicas(3) as host:
            client: Any = host.client
            one: Any = clients_of(host)[0].status.capacity
            largest: Any = client.status.capacity
            assert largest.max_num_seqs == 3 * one.max_num_seqs
            assert largest.num_blocks == 3 * one.num_blocks
            assert largest.capacity_tokens == 3 * one.capacity_tokens
            assert largest.max_model_len == one.max_model_len
            lost, status = clients_of(host)[0], client.status
            os.kill(host.supervisors[0].pid or 0, signal.SIGKILL)
            while lost.status.state is EngineState.READY:
                status = await client.wait_for_change(status)
            assert client.status.capacity.max_num_seqs == 2 * one.max_num_seqs
            while client.status.capacity != largest:
                status = await client.wait_for_change(status)
            shorter = replace(one, max_model_len=one.max_model_len - 1)
            lost._watch.connected(Welcome(lost._watch.instance or 0, shorter))
            assert client.status.capacity.max_model_len == one.max_model_len - 1

    run(work())


def test_a_pause_holds_in_an_engine_that_could_not_take_it() -> None:
    """Fault: one that restarted, or was stopped for a while, served requests although all had been
    paused, and the answer said that all are paused."""

    async def work() -> None:
        async with replicas(silence_s=SILENCE_S) as host:
            client: Any = host.client
            stopped = clients_of(host)[1]
            streams = [await ask(client, [i], max_tokens=200) for i in range(2)]
            os.kill(host.supervisors[1].pid or 0, signal.SIGSTOP)
            await until_state(stopped, EngineState.STALLED)
            await client.control(Pause("keep"))
            os.kill(host.supervisors[1].pid or 0, signal.SIGKILL)
            await until_state(stopped, EngineState.RESTARTING)
            await until_all_ready(host)
            assert (await stopped.control(Inspect())).is_paused
            assert (await client.control(Inspect())).is_paused
            await client.control(Resume())
            for i, stream in enumerate(streams):
                expected = FAKE_MODEL.expected_tokens([i], 200, 0)
                assert (await collect(stream)).tokens == {0: expected}
            await stopped.control(Pause("keep"))
            assert not (await client.control(Inspect())).is_paused

    run(work())
