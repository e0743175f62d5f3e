"""Engines that are alike behind one client: who gets a request, and what becomes of those of an
engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.supervision.host import EngineHost, host_engine
from quire.engine.supervision.stall import StallLimits
from quire.engine.supervision.supervisor import EngineSupervisor
from quire.protocol import FinishReason
from quire.protocol.control import Inspect
from quire.protocol.status import EngineState
from tests.engine.fake_core_process import KILLER, FakeCoreOptions
from tests.engine.process_harness import (
    FAKE_MODEL,
    RESTART_AT_ONCE,
    Collected,
    ask,
    by_flags,
    collect,
    run,
)


@contextlib.asynccontextmanager
async def replicas(size: int = 2, **client_options: Any) -> AsyncGenerator[EngineHost]:
    """Fake cores behind one client, all of them ready."""
    make_supervisor = partial(
        EngineSupervisor,
        heartbeat_interval_s=0.05,
        stall_limits=StallLimits(min_s=60.0, first_beat_s=60.0),
        restart_policy=RESTART_AT_ONCE,
        command=FakeCoreOptions(step_s=0.005, fault_after=2).command(),
    )
    async with host_engine(
        {"data_parallel_size": size},
        measure=by_flags,
        make_supervisor=make_supervisor,
        make_client=partial(ProcessEngineClient, **client_options),
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


def test_requests_go_to_the_least_busy_engine() -> None:
    """Turns red when a long request counts as much as a short one, or ties go to one engine."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            streams = [await ask(client, [1, 2], max_tokens=400)]
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


def test_requests_without_a_limit_are_spread() -> None:
    """Fault: each of their tokens made an engine look less busy, and it got all new requests."""

    async def work() -> None:
        async with replicas() as host:
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


def test_aborts_reach_the_engine_that_has_the_stream_now() -> None:
    """Turns red when a moved stream still belongs to the client that it came from."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            found = Collected()
            stream = await ask(client, [3, 4], max_tokens=250)
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
