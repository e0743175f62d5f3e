"""Pins of engines that are alike: all that are ready hold them, or none."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.replica_pins import ReplicaPins
from quire.protocol import EngineRequest, FinishReason, SamplingParams
from quire.protocol.control import ListPins, MapBlocks, Unpin
from quire.protocol.pins import PinnedPrefix, prefix_key
from quire.protocol.status import EngineState
from tests.engine.process_harness import (
    ask,
    collect,
    run,
    until_state,
)
from tests.engine.test_process_pins import PREFIX, PROMPT
from tests.engine.test_replicas import SILENCE_S, clients_of, replicas, until_all_ready


def pinning(client: Any, prompt: list[int], name: str = "pin") -> EngineRequest:
    """A request that pins its prompt for ever."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = np.array(prompt, np.int32)
    handle = client.reserve_handles(1)
    return EngineRequest(name, handle, tokens, params, 0, pin_seconds=math.inf)


async def pins_of(client: Any) -> tuple[PinnedPrefix, ...]:
    return (await client.control(ListPins())).pins


async def num_cached(client: Any, prompt: list[int]) -> int:
    async with await ask(client, prompt, max_tokens=3) as stream:
        return (await anext(stream)).num_cached_tokens or 0


def test_a_pin_is_in_all_engines() -> None:
    """Turns red when a request that starts with a pin may go to an engine without it, or a pin is
    let go in one engine alone."""

    async def work() -> None:
        async with replicas(3) as host:
            client: Any = host.client
            request = pinning(client, PREFIX)
            found = await collect(await client.add(request))
            assert found.finishes[0].reason is FinishReason.LENGTH
            for each in clients_of(host):
                assert await num_cached(each, [*PREFIX, 7]) == 23
            (held,) = await pins_of(client)
            assert (held.handle, held.name) == (request.first_handle, "pin")
            assert (held.num_tokens, held.num_blocks, held.hits) == (23, 3 * 6, 3)
            blocks = (await client.control(MapBlocks())).blocks
            assert blocks.count(b"p") == 3 * 6 and len(blocks) == client.status.capacity.num_blocks
            await collect(await client.add(pinning(client, PREFIX)))
            assert [pin.handle for pin in await pins_of(client)] == [request.first_handle]
            assert (await client.control(Unpin(held.handle))).was_there
            assert not (await client.control(Unpin(held.handle))).was_there
            for each in clients_of(host):
                assert await pins_of(each) == ()

    run(work())


async def until_pinned(client: ProcessEngineClient) -> PinnedPrefix:
    while not (pins := await pins_of(client)):
        await asyncio.sleep(0.01)
    (pin,) = pins
    return pin


def test_a_new_engine_gets_the_pins_of_the_others() -> None:
    """Turns red when a pin is in no list after an engine has died, or outlives its time there."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            for prompt, seconds in ((PREFIX, 3000.0), (PROMPT, 0.1)):
                request = replace(pinning(client, prompt), pin_seconds=seconds)
                await collect(await client.add(request))
            while len(await pins_of(client)) > 1:
                await asyncio.sleep(0.01)
            (first,) = await pins_of(client)
            for lost in (0, 1, 0):
                os.kill(host.supervisors[lost].pid or 0, signal.SIGKILL)
                await until_state(clients_of(host)[lost], EngineState.RESTARTING)
                while clients_of(host)[lost].status.state is not EngineState.READY:
                    assert [pin.key for pin in await pins_of(client)] == [first.key]
                    await asyncio.sleep(0.01)
                assert [pin.key for pin in await pins_of(client)] == [first.key]
                given = await until_pinned(clients_of(host)[lost])
                assert (given.key, given.name) == (first.key, first.name)
                assert 2000 < given.seconds_left < first.seconds_left
                while (await pins_of(client))[0].num_blocks < 2 * 6:
                    await asyncio.sleep(0.01)
            (second,) = await pins_of(client)
            assert (await client.control(Unpin(second.handle))).was_there
            for each in clients_of(host):
                assert await pins_of(each) == ()

    run(work())


@pytest.mark.parametrize("state", [EngineState.RESTARTING, EngineState.STALLED])
def test_a_pin_reaches_an_engine_that_is_ready_later(state: EngineState) -> None:
    """Fault: a pin that was asked for while an engine started was missing there, and then from the
    list. Also what is let go meanwhile is let go there."""

    async def work() -> None:
        async with replicas(silence_s=SILENCE_S) as host:
            client: Any = host.client
            late = clients_of(host)[1]
            await collect(await client.add(pinning(client, PROMPT, "old")))
            (old,) = await pins_of(client)
            pid = host.supervisors[1].pid or 0
            os.kill(pid, signal.SIGKILL if state is EngineState.RESTARTING else signal.SIGSTOP)
            await until_state(late, state)
            await collect(await client.add(pinning(client, PREFIX, "new")))
            await client.control(Unpin(old.handle))
            assert [pin.name for pin in await pins_of(client)] == ["new"]
            if state is EngineState.STALLED:
                os.kill(pid, signal.SIGCONT)
            await until_all_ready(host)
            while (await pins_of(client))[0].num_blocks < 2 * 6:
                await asyncio.sleep(0.01)
            assert [pin.name for pin in await pins_of(late)] == ["new"]
            assert await num_cached(late, [*PREFIX, 7]) == 23

    run(work())


def test_a_pin_is_in_an_engine_that_becomes_ready_while_others_compute_it() -> None:
    async def work() -> None:
        async with replicas(3) as host:
            client: Any = host.client
            slow, late = clients_of(host)[1:]
            os.kill(host.supervisors[2].pid or 0, signal.SIGKILL)
            await until_state(late, EngineState.RESTARTING)
            os.kill(host.supervisors[1].pid or 0, signal.SIGSTOP)
            pin = asyncio.ensure_future(client.add(pinning(client, PREFIX)))
            await until_state(late, EngineState.READY)
            assert slow.status.state is EngineState.READY and not pin.done()
            os.kill(host.supervisors[1].pid or 0, signal.SIGCONT)
            await collect(await pin)
            for each in clients_of(host):
                assert len(await pins_of(each)) == 1

    run(work())


def test_a_new_engine_gets_no_pin_that_another_has_lost() -> None:
    """Turns red when a pin that was evicted comes back in one engine, where no list tells of it."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            for prompt in PROMPT, PREFIX:
                await collect(await client.add(pinning(client, prompt)))
            lost = next(pin for pin in await pins_of(clients_of(host)[1]) if pin.num_tokens != 23)
            await clients_of(host)[1].control(Unpin(lost.handle))
            os.kill(host.supervisors[0].pid or 0, signal.SIGKILL)
            await until_state(clients_of(host)[0], EngineState.RESTARTING)
            await until_all_ready(host)
            while (await pins_of(client))[0].num_blocks < 2 * 6:
                await asyncio.sleep(0.01)
            assert (await until_pinned(clients_of(host)[0])).num_tokens == 23

    run(work())


def test_a_prefix_that_one_engine_refuses_is_pinned_in_none() -> None:
    """Turns red when a pin that nobody is told of takes blocks."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            full = clients_of(host)[1]
            for start in 0, 300, 600:
                large = list(range(start, start + 160))  # forty of the 128 blocks for pins
                await collect(await full.add(pinning(full, large)))
            for _ in range(2):  # whoever's turn it is
                with pytest.raises(RequestError, match="may be pinned"):
                    await collect(await client.add(pinning(client, list(range(800, 900)))))
            assert await pins_of(clients_of(host)[0]) == ()
            assert len(await pins_of(full)) == 3

    run(work())


@pytest.mark.parametrize("late", [0, 1])
def test_a_pin_that_nobody_waits_for_any_more_is_in_no_engine(late: int) -> None:
    """Though one of them has pinned it already."""

    async def work() -> None:
        async with replicas() as host:
            client: Any = host.client
            os.kill(host.supervisors[late].pid or 0, signal.SIGSTOP)
            pin = asyncio.ensure_future(client.add(pinning(client, PREFIX)))
            while not await pins_of(clients_of(host)[1 - late]):
                assert not pin.done(), "not all engines have it"
                await asyncio.sleep(0.01)
            pin.cancel()
            await asyncio.sleep(0.01)
            os.kill(host.supervisors[late].pid or 0, signal.SIGCONT)
            with pytest.raises(asyncio.CancelledError):
                await pin
            await until_all_ready(host)
            for each in clients_of(host):
                assert await pins_of(each) == ()
            assert client.num_unfinished == 0

    run(work())


def test_a_pin_is_let_go_in_an_engine_that_is_stalled_when_nobody_waits_any_more() -> None:
    """Fault: the blocks of the pin were held for ever, and no list told of it."""

    async def work() -> None:
        async with replicas(silence_s=SILENCE_S) as host:
            client: Any = host.client
            stopped = [each.pid or 0 for each in host.supervisors]
            os.kill(stopped[1], signal.SIGSTOP)
            pin = asyncio.ensure_future(client.add(pinning(client, PREFIX)))
            while not await pins_of(clients_of(host)[0]):
                assert not pin.done(), "not all engines have it"
                await asyncio.sleep(0.01)
            os.kill(stopped[0], signal.SIGSTOP)
            for each in clients_of(host):
                await until_state(each, EngineState.STALLED)
            pin.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pin
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            await until_all_ready(host)
            for each in clients_of(host):
                assert await pins_of(each) == ()

    run(work())


class Replica:
    """A replica whose engine takes a pin at once, refuses it, or ends by it."""

    def __init__(self) -> None:
        self.status = SimpleNamespace(state=EngineState.READY)
        self.instance, self.is_settled = 1, True
        self.pins: dict[int, SimpleNamespace] = {}
        self.num_asked = 0
        self.end: Callable[[], None] | None = None

    def reserve_handles(self, count: int) -> int:
        return self.num_asked + count

    async def add(self, request: EngineRequest) -> Any:
        self.num_asked += 1
        if self.end is not None:
            self.end()
        key = prefix_key(request.prompt_token_ids, request.salt, is_shared=False)
        self.pins[request.first_handle] = SimpleNamespace(key=key, handle=request.first_handle)
        finish = SimpleNamespace(reason=FinishReason.LENGTH, message=None)
        return SimpleNamespace(
            is_finished=True, listen=lambda _: None, samples=[SimpleNamespace(finish=finish)]
        )

    async def control(self, op: Any) -> Any:
        if isinstance(op, Unpin):
            self.pins.pop(op.handle)
        return SimpleNamespace(pins=tuple(self.pins.values()))

    def restart(self) -> None:
        self.instance += 1
        self.pins.clear()

    def refuse(self) -> None:
        raise RequestError("it has no room")


@pytest.mark.parametrize("ends", [True, False])
def test_a_pin_that_an_engine_cannot_take_is_let_go_in_all(ends: bool) -> None:
    """Fault: a pin that ends one engine was given to each engine that took its place, and one that
    an engine refused stayed in others, where no list told of it."""

    async def work() -> None:
        replicas: Any = Replica(), Replica()
        pins = ReplicaPins(replicas, lambda *_: None)
        client = SimpleNamespace(reserve_handles=lambda _: 1)
        await pins.pin(pinning(client, PREFIX))
        holder, other = replicas
        assert holder.pins and other.pins
        other.restart()
        other.end = other.restart if ends else other.refuse
        for _ in range(9):
            pins.look()
            await asyncio.gather(*pins._settling.values())
            if ends:
                other.pins.clear()  # what ended it did not get so far
        assert other.num_asked == (3 if ends else 2)
        assert not holder.pins

    run(work())
