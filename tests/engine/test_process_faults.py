"""A core in a process of its own that dies, hangs or cannot start: every stream ends once, and
whatever can be continued is continued as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import pytest

from quire.base.errors import ConfigError, EngineError, EngineUnavailableError
from quire.engine.clients import core_connection
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.core.heartbeat import heartbeats
from quire.engine.supervision import supervisor
from quire.protocol import FinishReason
from quire.protocol.codec import Codec, GarbledMessageError
from quire.protocol.control import Inspect, Pause, Sleep, Wake
from quire.protocol.messages import CoreMessage
from quire.protocol.status import CORE_STARTS, EngineState
from tests.engine.fake_core_process import HANGER, KILLER, STOPPER, FakeCoreOptions
from tests.engine.process_harness import (
    ENDLESS,
    FAKE_MODEL,
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_fresh,
    until_idle,
    until_state,
)
from tests.waiting import WAIT_S

SLOW = FakeCoreOptions(step_s=0.005)


def test_streams_survive_kills_at_random_points() -> None:
    """Under load, with n > 1 among the requests: tokens equal those of an engine without faults."""

    async def work() -> None:
        rng = random.Random(1)
        async with hosted(SLOW, max_replays=8) as host:
            wanted, streams = [], []
            for i in range(24):
                prompt = [i, *range(rng.randrange(1, 30))]
                n, length = rng.choice([1, 1, 3]), rng.randrange(1, 80)
                stream = await ask(host.client, prompt, seed=i, n=n, max_tokens=length)
                streams.append(asyncio.ensure_future(collect(stream)))
                wanted.append(
                    {s: FAKE_MODEL.expected_tokens(prompt, length, i, s) for s in range(n)}
                )
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0.02, 0.25))
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(host.client, EngineState.RESTARTING)
                await until_state(host.client, EngineState.READY)
            for stream, tokens in zip(streams, wanted, strict=True):
                found = await stream
                assert found.tokens == tokens
                assert {f.reason for f in found.finishes.values()} == {FinishReason.LENGTH}
            assert host.client.status.restarts == 3
            await until_idle(host.client)

    run(work())


def test_who_kills_the_core_fails_and_nobody_else() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.002, fault_after=3)) as host:
            good = [
                asyncio.ensure_future(
                    collect(await ask(host.client, [i, 1], seed=i, max_tokens=100))
                )
                for i in range(6)
            ]
            await asyncio.sleep(0.05)
            poison = await ask(host.client, [5, KILLER, 7], max_tokens=50)
            found = await collect(poison)
            assert found.finishes[0].reason is FinishReason.ERROR
            assert "died 3 times" in found.finishes[0].message
            for i, task in enumerate(good):
                assert (await task).tokens[0] == FAKE_MODEL.expected_tokens([i, 1], 100, i)
            await until_state(host.client, EngineState.READY)
            assert host.client.status.restarts == 3
            again = await collect(await ask(host.client, [8], max_tokens=3))
            assert again.tokens[0] == FAKE_MODEL.expected_tokens([8], 3, 0)

    run(work())


def test_without_replays_streams_fail_in_band_at_once() -> None:
    async def work() -> None:
        options = FakeCoreOptions.endless(step_s=0.005)
        async with hosted(options, max_replays=0) as host:
            found = Collected()
            task = asyncio.ensure_future(
                collect(await ask(host.client, [3, 4], max_tokens=ENDLESS), found)
            )
            while not found.tokens:
                await asyncio.sleep(0.01)
            os.kill(host.supervisor.pid, signal.SIGKILL)
            await asyncio.wait_for(task, WAIT_S)
            assert found.finishes[0].reason is FinishReason.ERROR
            tokens = found.tokens[0]
            assert tokens == FAKE_MODEL.expected_tokens([3, 4], len(tokens), 0)

    run(work())


@pytest.mark.parametrize("fatal", [HANGER, STOPPER])
def test_a_hang_is_noticed_and_ended(fatal: int) -> None:
    """In one step forever with a heartbeat, or stopped as a whole without one."""

    async def work() -> None:
        # It falls some beats after it began, so that the limit of beats holds, not that of starts.
        options = FakeCoreOptions(step_s=0.1, fault_after=5)
        limits = {"stall_s": 2.0, "silence_s": 0.5, "stalled_step_s": 0.5}
        async with hosted(options, max_replays=1, **limits) as host:
            stream = asyncio.ensure_future(collect(await ask(host.client, [fatal], max_tokens=50)))
            await until_state(host.client, EngineState.STALLED)
            with pytest.raises(EngineUnavailableError):
                await ask(host.client, [1])
            found = await stream
            assert found.finishes[0].reason is FinishReason.ERROR
            await until_state(host.client, EngineState.READY)
            assert host.client.status.restarts == 2

    run(work())


class GarblingCodec:
    """Fails at messages from number `first` on, `count` times."""

    def __init__(self, codec: Codec[CoreMessage], first: int, count: int) -> None:
        self._codec, self._first, self._count, self._seen = codec, first, count, 0

    def decode(self, data: bytes) -> CoreMessage:
        self._seen += 1
        if self._first <= self._seen < self._first + self._count:
            raise GarbledMessageError("not a message")
        return self._codec.decode(data)


@pytest.mark.parametrize("first", [1, 2, 7])
def test_a_garbled_message_of_the_core_costs_nobody_a_token(first: int) -> None:
    """The client has its requests replayed; the core, which is well, serves on."""

    async def work() -> None:
        async with hosted(SLOW) as host:
            connection = host.client._connection
            connection._codec = GarblingCodec(connection._codec, first, 1)
            streams = [
                asyncio.ensure_future(collect(await ask(host.client, [i, 1], seed=i, n=2)))
                for i in range(4)
            ]
            for i, stream in enumerate(streams):
                for sample, tokens in (await stream).tokens.items():
                    assert tokens == FAKE_MODEL.expected_tokens([i, 1], 16, i, sample)
            await until_idle(host.client)
            assert host.client.status.state is EngineState.READY
            assert host.client.status.restarts == 0
            assert host.client.stats.garbled_messages_total == 1

    run(work())


def test_a_core_that_only_sends_garbage_ends_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with hosted(SLOW) as host:
            stream = asyncio.ensure_future(collect(await ask(host.client, [1], max_tokens=200)))
            garbling = GarblingCodec(host.client._connection._codec, 1, 10**9)
            monkeypatch.setattr(core_connection, "Codec", lambda _: garbling)
            host.client._connection._codec = garbling
            assert (await stream).finishes[0].reason is FinishReason.ERROR
            assert host.client.status.state is EngineState.DEAD

    run(work())


def test_a_watch_that_fails_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang must be found even after the watch itself has failed."""
    failures = [RuntimeError("a fault of the watch")] * 2

    async def failing(context, directory, silence_s):
        if failures:
            raise failures.pop()
        async for beat in heartbeats(context, directory, silence_s):
            yield beat

    monkeypatch.setattr(supervisor, "heartbeats", failing)
    monkeypatch.setattr(supervisor, "WATCH_AGAIN_S", 0.05)

    async def work() -> None:
        async with hosted(stall_s=2.0, max_replays=0, silence_s=0.5) as host:
            stream = asyncio.ensure_future(collect(await ask(host.client, [HANGER], max_tokens=5)))
            assert (await stream).finishes[0].reason is FinishReason.ERROR
            await until_state(host.client, EngineState.READY)
            assert host.client.status.restarts == 1 and not failures

    run(work())


def test_a_long_step_is_no_hang() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.8), stall_s=20.0) as host:
            found = await collect(await ask(host.client, [1], max_tokens=5))
            assert found.finishes[0].reason is FinishReason.LENGTH
            assert host.client.status.restarts == 0

    run(work())


def test_settings_that_cannot_work_are_reported_and_not_tried_again() -> None:
    async def work() -> None:
        options = FakeCoreOptions(start_error="config:no such model: name another one")
        async with hosted(options, wait=False) as host:
            await until_state(host.client, EngineState.DEAD)
            assert host.client.status.message == "no such model: name another one"
            with pytest.raises(ConfigError, match="no such model"):
                await host.supervision
            with pytest.raises(EngineUnavailableError, match="no such model"):
                await ask(host.client, [1])
            assert host.client.status.restarts == 0

    run(work())


def test_a_start_without_end_is_ended_and_says_why() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(start_s=WAIT_S), phase_s=0.1, wait=False) as host:
            await until_state(host.client, EngineState.DEAD)
            # A busy machine may take longer than the limit before the first phase has a name.
            named = f"'({CORE_STARTS}|loading)' has taken .* s, 0.1 s are allowed"
            message = host.client.status.message
            assert re.search(f"killed by SIGKILL, since it has not started: {named}", message)

    run(work())


def test_a_core_is_replaced_though_its_files_were_tidied_away() -> None:
    """Fault: a core whose file had gone seemed to have never started."""

    async def work() -> None:
        async with hosted() as host:
            await until_fresh(host.client)
            while not host.supervisor._was_ready:  # it hears the core by a socket of its own
                await asyncio.sleep(0.01)
            for path in host.directory.iterdir():
                if path.is_file():  # no socket, which nobody takes away
                    path.unlink()
            stream = asyncio.ensure_future(collect(await ask(host.client, [1], max_tokens=100)))
            os.kill(host.supervisor.pid, signal.SIGKILL)
            await until_state(host.client, EngineState.RESTARTING)
            await until_state(host.client, EngineState.READY)
            assert (await stream).tokens == {0: FAKE_MODEL.expected_tokens([1], 100, 0)}
            assert host.client.status.restarts == 1

    run(work())


def test_a_pause_and_a_sleep_outlive_their_core() -> None:
    """Fault: the next core was awake, and computed requests that were to stand still."""

    async def work() -> None:
        async with hosted(SLOW) as host:
            client = host.client
            stream = await ask(client, [1], max_tokens=200)
            await client.control(Pause("keep"))
            assert (await client.control(Inspect())).is_paused  # and all steps have been told
            num_tokens = stream.num_tokens
            os.kill(host.supervisor.pid, signal.SIGKILL)
            await until_state(client, EngineState.RESTARTING)
            await until_fresh(client)
            assert (await client.control(Sleep(2, "keep"))).is_paused
            os.kill(host.supervisor.pid, signal.SIGUSR2)  # it goes by itself
            await until_state(client, EngineState.RESTARTING)
            await until_state(client, EngineState.SLEEPING)
            assert (await client.control(Inspect())).sleep_level == 2
            assert stream.num_tokens == num_tokens and not stream.is_finished
            other = ProcessEngineClient(host.directory, client_id=1)
            await until_state(other, EngineState.SLEEPING)
            await other.control(Wake())
            await other.close()
            assert (await collect(stream)).tokens == {0: FAKE_MODEL.expected_tokens([1], 200, 0)}

    run(work())


def test_a_core_that_never_comes_back_ends_the_streams() -> None:
    async def work() -> None:
        options = FakeCoreOptions.endless(step_s=0.01, start_error="bug:disk is gone", error_from=1)
        async with hosted(options) as host:
            asked = await ask(host.client, [1], max_tokens=ENDLESS)
            stream = asyncio.ensure_future(collect(asked))
            while not asked.num_tokens:
                await asyncio.sleep(0.01)
            os.kill(host.supervisor.pid, signal.SIGKILL)
            found = await stream
            assert "disk is gone" in found.finishes[0].message
            assert host.client.status.state is EngineState.DEAD
            with pytest.raises(EngineError, match="disk is gone"):
                await host.supervision

    run(work())


def test_streams_do_not_wait_for_a_restart_for_ever() -> None:
    async def work() -> None:
        options = FakeCoreOptions.endless(step_s=0.01)
        async with hosted(options, restart_timeout_s=0.0) as host:
            asked = await ask(host.client, [1], max_tokens=ENDLESS)
            stream = asyncio.ensure_future(collect(asked))
            while not asked.num_tokens:
                await asyncio.sleep(0.01)
            os.kill(host.supervisor.pid, signal.SIGKILL)
            assert "did not come back" in (await stream).finishes[0].message
            await until_state(host.client, EngineState.READY)

    run(work())


def test_phases_of_the_start_are_told(tmp_path: Path) -> None:
    goes_on = tmp_path / "goes on"

    async def work() -> None:
        options = FakeCoreOptions(start_s=0.5, start_file=str(goes_on))
        async with hosted(options, wait=False) as host:
            client, seen = host.client, []
            status = client.status
            while status.state is not EngineState.READY:
                seen += [phase.name for phase in status.phases if not phase.is_done]
                if "loading" in seen:
                    goes_on.touch()
                assert not status.phases[-1].is_done
                with pytest.raises(EngineUnavailableError):
                    await ask(client, [1])
                status = await client.wait_for_change(status)
            assert seen[0] == CORE_STARTS and "loading" in seen
            assert status.capacity is not None
            assert status.capacity.capacity_tokens == 1024
            while client.status.phases[-1].name != "ready":
                status = await client.wait_for_change(client.status)
            assert client.status.phases[0].seconds >= 0.5

    run(work())
