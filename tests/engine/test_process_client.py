"""A core in a process of its own, seen by its clients: streams, aborts, limits, nothing left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import zmq
import zmq.asyncio

from quire.base.errors import RequestError
from quire.base.telemetry.flight.record import RING_PREFIX, read_record
from quire.engine.clients.engine_watch import EngineWatch
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.core.socket import core_address
from quire.engine.supervision.private_directory import private_directory
from quire.engine.supervision.supervisor import RestartPolicy
from quire.protocol import FinishReason, SamplingParams
from quire.protocol.codec import Codec, encode
from quire.protocol.control import Inspect, Pause, Report, Resume, Sleep, Unpin, Wake
from quire.protocol.messages import (
    HANDLES_PER_CLIENT,
    PROTOCOL_VERSION,
    Abort,
    Add,
    Answer,
    Control,
    CoreMessage,
    Goodbye,
    Hello,
    Output,
    Rejected,
    Welcome,
)
from quire.protocol.pooling_params import CLASSIFYING, Pooling
from quire.protocol.request import EngineOutput
from quire.protocol.status import EngineCapacity, EngineState
from tests.engine.fake_core_process import FakeCoreOptions
from tests.engine.process_harness import (
    ENDLESS,
    FAKE_MODEL,
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_idle,
    until_state,
)
from tests.forked import FAKE, Forked, template_of
from tests.waiting import WAIT_S, wait_for


def test_many_streams_at_once_each_get_their_own_tokens() -> None:
    async def work() -> None:
        async with hosted() as host:
            streams = [
                await ask(host.client, [i], seed=i, n=1 + i % 3, max_tokens=5 + i)
                for i in range(40)
            ]
            founds = await asyncio.gather(*map(collect, streams))
            for i, found in enumerate(founds):
                assert found.tokens == {
                    s: FAKE_MODEL.expected_tokens([i], 5 + i, i, s) for s in range(1 + i % 3)
                }
            await until_idle(host.client)
            stats = host.client.stats
            assert stats.requests_total == 40
            assert stats.generation_tokens_total == sum((5 + i) * (1 + i % 3) for i in range(40))
            assert sum(stats.step_tokens) >= 45
            assert host.client.num_unfinished == 0

    run(work())


def test_a_slow_reader_gets_larger_updates() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.001)) as host:
            stream = await ask(host.client, [1], max_tokens=200)
            first = await anext(stream)
            while not stream.is_finished:  # all has come, and nobody has read it
                await asyncio.sleep(0.02)
            found = await collect(stream)
            assert found.num_updates == 1
            tokens = first.samples[0].token_ids + found.tokens[0]
            assert tokens == FAKE_MODEL.expected_tokens([1], 200, 0)

    run(work())


def test_going_on_ends_a_pause_that_waits() -> None:
    """Fault: the answer to the resume says that all is well, and the engine stops when requests
    have ended."""

    async def work() -> None:
        async with hosted(FakeCoreOptions.endless(step_s=0.02)) as host:
            client = host.client
            stream = await ask(client, [1], max_tokens=ENDLESS)
            await anext(stream)
            pause = asyncio.ensure_future(client.control(Pause("wait")))
            later = asyncio.ensure_future(client.control(Sleep(1, "keep")))
            assert not (await client.control(Inspect())).is_paused
            assert not later.done()  # it would stop what the pause waits for
            report = await client.control(Wake())
            assert not report.is_paused and not report.sleep_level
            with pytest.raises(RequestError, match="told to go on"):
                await pause
            assert (await later).sleep_level == 1
            await collect(await ask(client, [2], max_tokens=3))
            stream.abort()
            await until_idle(client)

    run(work())


def test_an_abort_storm_leaks_nothing() -> None:
    """Half of the streams are left after a random number of updates; the others are complete."""

    async def one(client: ProcessEngineClient, i: int, rng: random.Random) -> None:
        stream = await ask(client, [i % 100, 5], seed=i, n=1 + i % 2, max_tokens=20)
        if i % 2:
            found = await collect(stream)
            for sample, tokens in found.tokens.items():
                assert tokens == FAKE_MODEL.expected_tokens([i % 100, 5], 20, i, sample)
            return
        left = rng.randrange(8)
        async with stream:
            async for _ in stream:
                left -= 1
                if left <= 0:
                    break

    async def work() -> None:
        rng = random.Random(0)
        async with hosted(FakeCoreOptions(num_blocks=64)) as host:
            await asyncio.gather(*(one(host.client, i, rng) for i in range(160)))
            assert host.client.num_unfinished == 0
            await until_idle(host.client)
            assert host.client.stats.aborted_total > 0
            assert host.client.status.restarts == 0

    run(work())


def test_an_abort_frees_within_two_steps() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.3)) as host:
            stream = await ask(host.client, [1, 2, 3], max_tokens=200)
            await anext(stream)
            stream.abort()
            ring = (host.directory / f"{RING_PREFIX}0").read_bytes()
            steps = read_record(ring).num_steps
            assert (await anext(stream)).samples[0].finish.reason is FinishReason.ABORT
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await until_idle(host.client)
            assert (
                host.client.stats.steps_total <= steps + 4
            )  # two in flight, and the message's delay

    run(work())


def test_a_request_that_can_never_be_served_is_refused() -> None:
    async def work() -> None:
        async with hosted(max_message_bytes=4000) as host:
            with pytest.raises(RequestError, match="the prompt has 300 tokens"):
                await ask(host.client, [1] * 300, max_tokens=5)
            with pytest.raises(RequestError, match="may be sent"):
                await ask(host.client, [1] * 2000)
            with pytest.raises(RequestError, match="logits_processors"):
                await ask(host.client, [1], logits_processors=[lambda ids, logits: logits])
            assert host.client.num_unfinished == 0

    run(work())


def test_several_fronts_share_a_core() -> None:
    """Each with its own handles; one that leaves frees what it had, and bothers nobody."""

    async def work() -> None:
        async with hosted(FakeCoreOptions.endless(step_s=0.002)) as host:
            other = ProcessEngineClient(host.directory, client_id=1)
            await until_state(other, EngineState.READY)
            assert other.reserve_handles(1) == HANDLES_PER_CLIENT
            mine = asyncio.ensure_future(collect(await ask(host.client, [1], max_tokens=150)))
            theirs = await ask(other, [2], max_tokens=ENDLESS)
            await anext(theirs)
            third = await ask(other, [3], seed=3, max_tokens=10)
            assert (await collect(third)).tokens[0] == FAKE_MODEL.expected_tokens([3], 10, 3)
            await other.close()
            assert (await collect(theirs)).finishes[0].reason is FinishReason.ERROR
            assert (await mine).tokens[0] == FAKE_MODEL.expected_tokens([1], 150, 0)
            await until_idle(host.client)

    run(work())


def test_messages_that_are_none_are_refused_and_the_core_lives() -> None:
    async def work() -> None:
        async with hosted() as host:
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(core_address(host.directory))
            codec: Codec[CoreMessage] = Codec(CoreMessage)
            stream = await ask(host.client, [1], max_tokens=3)
            foreign = encode(Add(stream.request))
            await socket.send(foreign)  # before its Hello
            for late in (Abort([0]), Goodbye()):  # as of one that was dropped: no fault
                await socket.send(encode(late))
            await socket.send(encode(Hello(99, 5)))
            rejected = codec.decode(await socket.recv())
            assert isinstance(rejected, Rejected)
            assert "version 99" in rejected.message
            await socket.send(encode(Hello(PROTOCOL_VERSION, -1)))
            assert isinstance(codec.decode(await socket.recv()), Rejected)
            await socket.send(encode(Hello(PROTOCOL_VERSION, 5)))
            assert isinstance(codec.decode(await socket.recv()), Welcome)
            await socket.send(b"")
            await socket.send(os.urandom(1000))
            await socket.send_multipart([b"two", b"frames"])
            await socket.send(foreign)  # with a handle of another client
            await socket.send(encode(Abort([0, -5, 2**62])))
            await socket.send(b"\0" * (65 * 2**20))
            assert (await collect(stream)).finishes[0].reason is FinishReason.LENGTH
            while host.client.stats.garbled_messages_total < 6:
                await asyncio.sleep(0.02)
            found = await collect(await ask(host.client, [4], max_tokens=3))
            assert found.tokens[0] == FAKE_MODEL.expected_tokens([4], 3, 0)
            assert host.client.stats.garbled_messages_total == 6
            assert host.client.status.restarts == 0
            context.destroy(linger=0)

    run(work())


def test_drain_serves_what_is_there_and_fails_what_takes_too_long() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions.endless(step_s=0.05)) as host:
            short = asyncio.ensure_future(collect(await ask(host.client, [1], max_tokens=5)))
            long = asyncio.ensure_future(collect(await ask(host.client, [2], max_tokens=ENDLESS)))
            draining = asyncio.ensure_future(host.client.drain(WAIT_S))
            await until_state(host.client, EngineState.DRAINING)
            assert (await short).finishes[0].reason is FinishReason.LENGTH
            assert not draining.done()
            draining.cancel()
            await host.client.drain(0.5)
            assert "not finished in 0.5 s" in (await long).finishes[0].message
            assert host.client.status.state is EngineState.DRAINING

    run(work())


def test_a_drain_ends_with_the_last_request_even_without_a_core() -> None:
    """Its reader leaves while no core has it."""

    async def work() -> None:
        policy = RestartPolicy(first_delay_s=3600.0)
        async with hosted(FakeCoreOptions(step_s=0.05), policy=policy, max_replays=5) as host:
            stream = await ask(host.client, [1], max_tokens=500)
            for _ in range(2):  # the first restart is at once
                await until_state(host.client, EngineState.READY)
                assert host.supervisor.pid is not None
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(host.client, EngineState.RESTARTING)
            draining = asyncio.ensure_future(host.client.drain(3600.0))
            await until_state(host.client, EngineState.DRAINING)
            stream.abort()
            await draining

    run(work())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_whole_group_are_for_the_front(number: signal.Signals) -> None:
    """The core serves on, as often as it is told to end, until its front needs it no more."""

    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.01)) as host:
            stream = asyncio.ensure_future(collect(await ask(host.client, [1], max_tokens=40)))
            for _ in range(3):
                os.kill(host.supervisor.pid, number)
                await asyncio.sleep(0.05)
            assert (await stream).tokens[0] == FAKE_MODEL.expected_tokens([1], 40, 0)
            late = await collect(await ask(host.client, [2], max_tokens=5))
            assert late.tokens[0] == FAKE_MODEL.expected_tokens([2], 5, 0)
            assert host.client.status.restarts == 0

    run(work())


def test_sigusr2_lets_a_core_finish_what_it_has() -> None:
    """And then it ends, and another one takes over."""

    async def work() -> None:
        async with hosted(FakeCoreOptions(step_s=0.01)) as host:
            found = Collected()
            asked = await ask(host.client, [1], max_tokens=200)
            stream = asyncio.ensure_future(collect(asked, found))
            while not found.tokens:  # what the core does not have yet, the next one serves
                await asyncio.sleep(0.01)
            os.kill(host.supervisor.pid, signal.SIGUSR2)
            await until_state(host.client, EngineState.DRAINING)
            assert (await stream).tokens[0] == FAKE_MODEL.expected_tokens([1], 200, 0)
            while host.client.status.restarts == 0:
                await asyncio.sleep(0.02)
            await until_state(host.client, EngineState.READY)

    run(work())


def test_nothing_is_left_behind() -> None:
    async def work() -> None:
        async with hosted() as host:
            directory, pid = host.directory, host.supervisor.pid
            assert directory.stat().st_mode & 0o777 == 0o700
            with pytest.raises(BlockingIOError):  # so that nobody tidies it who asks
                await asyncio.to_thread(_lock, directory)
            stream = await ask(host.client, [1], max_tokens=100)
        assert (await collect(stream)).finishes[0].reason is FinishReason.ERROR
        assert not directory.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    run(work())
    run(work())
    assert len(os.listdir("/proc/self/task")) <= threads + 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_a_core_dies_with_its_parent_and_the_next_start_clears_up() -> None:
    read, write = os.pipe()
    given = {0: 0, 1: write, 2: 2}
    parent = Forked(template_of(FAKE).start("tests.engine.orphan_maker:main", [], given))
    os.close(write)
    try:
        with os.fdopen(read) as told:
            line = told.readline().split()
        pid, directory = int(line[0]), Path(line[1])
        os.kill(pid, 0)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not _is_alive(pid), "end of the core, which outlives its parent")
    with private_directory() as other:
        assert other.exists()
    assert not directory.exists()


def _lock(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped by the system's first process does
    not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_client_needs_no_torch_and_no_engine() -> None:
    code = (
        "import sys, quire.engine.supervision.host\n"
        "heavy = {'torch', 'transformers', 'quire.plan', 'tokenizers'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_stays_in_the_front() -> None:
    async def work() -> None:
        async with hosted() as host:
            stream = await ask(
                host.client, [1], max_tokens=3, stop=["secret"], bad_words=["secret"]
            )
            assert stream.request.params == SamplingParams(temperature=0.0, max_tokens=3)
            await collect(stream)

    run(work())


def test_a_vector_crosses_the_process_with_its_end() -> None:
    async def work() -> None:
        async with hosted() as host:
            prompt = list(range(40))
            for pooling in set(get_args(Pooling)) - set(CLASSIFYING):
                stream = await ask(host.client, prompt, pooling=pooling)
                updates = [update async for update in stream]
                (vector,) = [u.vector for u in updates if u.vector is not None]
                (finish,) = [s.finish for u in updates for s in u.samples if s.finish]
                assert finish.reason is FinishReason.STOP
                expected = FAKE_MODEL.expected_vector(prompt, pooling)
                np.testing.assert_array_equal(vector, expected)

    run(work())


PAUSE, SLEEP = Pause("keep"), Sleep(1, "keep")
CAPACITY = EngineCapacity(64, 8, 64, 16, 64, 1024, ((None, 64),), False)


class RecordedConnection:
    """A connection to a core that says only what a test has it say. sent: messages, in order."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self, *, say_goodbye: bool) -> None:
        """There is nobody."""


async def greeted_client(directory: Path, owed: Sequence[Any]) -> tuple[Any, RecordedConnection]:
    """A client with operations for later, and a core that has just greeted it."""
    client: Any = ProcessEngineClient(directory)
    for task in client._tasks:
        task.cancel()  # before they begin
    await asyncio.gather(*client._tasks, return_exceptions=True)
    for op in owed:
        client.control_later(op)
    client._connection = connection = RecordedConnection()
    client._take(Welcome(0, CAPACITY))
    return client, connection


def test_a_request_sent_before_an_owed_operation_is_answered_is_not_replayed(
    tmp_path: Path,
) -> None:
    """Fault: it was computed twice, and both computations fed its stream."""

    async def work() -> None:
        client, connection = await greeted_client(tmp_path, [Pause("keep")])
        stream = await ask(client, [1], max_tokens=4)
        (query,) = [each.query for each in connection.sent if isinstance(each, Control)]
        client._take(Answer(query, Report(), "", 1))
        assert len(connection.sent) == 2
        handles = np.array(list(client._open._in_core), np.int64)
        tokens = np.full(len(handles), 5, np.int32)
        client._take(Output(EngineOutput(handles, tokens)))
        assert stream.samples[0].token_ids == [5]
        await client.close()

    run(work())


@pytest.mark.parametrize(
    ("ops", "left"),
    [
        ([PAUSE, Wake()], [PAUSE, Wake()]),
        ([PAUSE, Resume()], [Resume()]),
        ([PAUSE, SLEEP], [SLEEP]),
        ([SLEEP, PAUSE], [SLEEP, PAUSE]),
        ([PAUSE, SLEEP, Wake()], [Wake(), Resume()]),
        ([PAUSE, Wake(), PAUSE, Wake(), Resume()], [PAUSE, Wake(), Resume()]),
        ([PAUSE, Unpin(3), Unpin(4), SLEEP, Wake()], [Unpin(3), Unpin(4), Wake(), Resume()]),
    ],
)
def test_operations_for_later_end_as_all_of_them_would(
    ops: list[Any], left: list[Any], tmp_path: Path
) -> None:
    """Fault: a wake-up that changed nothing took the place of a pause."""

    async def work() -> None:
        client, connection = await greeted_client(tmp_path, ops)
        assert [each.op for each in connection.sent] == left
        client.control_later(SLEEP)
        assert connection.sent[-1].op == SLEEP
        await client.close()

    run(work())


def test_a_core_that_stops_before_its_first_beat_holds_nobody_up() -> None:
    """Fault: with replicas, a request waited for such a core until its supervisor replaced it."""
    watch = EngineWatch(stalled_step_s=30, stuck_step_s=5)
    watch.beat(None)
    assert not watch.is_stuck, "there is no core yet"
    watch.connected(Welcome(0, CAPACITY))
    assert not watch.is_stuck, "it has just been heard"
    watch.beat(None)
    assert watch.is_stuck
