"""A follower of a core's beats can be stopped, whatever comes at that moment, and takes no core for
silent, stuck or draining that is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from quire.base.telemetry import EngineStats
from quire.engine.clients.engine_watch import EngineWatch
from quire.engine.core.heartbeat import heartbeats
from quire.protocol.codec import encode
from quire.protocol.messages import Heartbeat, Welcome
from quire.protocol.status import EngineCapacity, EngineState
from tests.waiting import WAIT_S

CAPACITY = EngineCapacity(64, 8, 64, 16, 64, 1024, ((None, 64),), False)


class OneReader:
    """A context and its only socket. message: next message, which a test sets. queue: messages for
    those who do not wait."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] | None = None
        self.queue: list[bytes] = []
        self.is_closed = False

    def socket(self, kind: int) -> OneReader:
        return self

    def setsockopt(self, option: int, value: int) -> None: ...

    def subscribe(self, topic: bytes) -> None: ...

    def connect(self, address: str) -> None: ...

    def recv(self, flags: int = 0) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not flags & zmq.NOBLOCK:
            self.message = future
        elif self.queue:
            future.set_result(self.queue.pop(0))
        else:
            future.set_exception(zmq.Again())
        return future

    def close(self) -> None:
        self.is_closed = True


def test_a_beat_that_comes_with_the_cancellation_does_not_swallow_it() -> None:
    async def work() -> None:
        context = OneReader()

        async def follow() -> None:
            async for _ in heartbeats(context, Path("/nowhere"), silence_s=5.0):
                pass

        task = asyncio.ensure_future(follow())
        while context.message is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it waits for the message now
        context.message.set_result(b"a beat")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), WAIT_S)
        assert task.cancelled()

    asyncio.run(work())


def test_silence_is_told_again_and_again() -> None:
    async def work() -> None:
        beats = heartbeats(OneReader(), Path("/nowhere"), silence_s=0.01)
        assert [await anext(beats) for _ in range(3)] == [None, None, None]
        await beats.aclose()

    asyncio.run(work())


def test_a_follower_that_slept_reads_what_came_meanwhile() -> None:
    """Fault: a server that got no processor time for a while took its engine for silent, and
    refused requests."""

    async def work() -> None:
        reader = OneReader()
        reader.queue = [encode(Heartbeat(3, ()))]
        beats = heartbeats(reader, Path("/nowhere"), silence_s=0.01)
        found = await anext(beats)
        assert found is not None and found.instance == 3
        assert await anext(beats) is None
        await beats.aclose()

    asyncio.run(work())


HUNG = Heartbeat(0, (), is_ready=True, step_seconds=9.0, stats=EngineStats(num_running=3))
DRAINING = Heartbeat(0, (), is_ready=True, is_draining=True)


@pytest.mark.parametrize(
    ("last", "state"),
    [(HUNG, EngineState.STALLED), (DRAINING, EngineState.DRAINING), (None, EngineState.STALLED)],
    ids=["hung", "draining", "silent"],
)
def test_what_a_core_was_says_nothing_of_the_next(
    last: Heartbeat | None, state: EngineState
) -> None:
    """Fault: a core that had replaced another one counted as hung, draining or silent until its
    next beat, and requests were refused."""
    watch = EngineWatch(stalled_step_s=1.0, stuck_step_s=1.0)
    watch.connected(Welcome(0, CAPACITY))
    watch.beat(Heartbeat(0, (), is_ready=True))
    watch.beat(last)
    assert watch.status.state is state
    assert watch.is_stuck == (state is EngineState.STALLED)
    watch.disconnected()
    assert watch.status.state is EngineState.RESTARTING
    watch.connected(Welcome(1, CAPACITY))
    assert (watch.status.state, watch.is_stuck) == (EngineState.READY, False)
    assert watch.stats.num_running == 0
