"""Pinned prefixes of several engines: all that are ready hold them, or none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.base.errors import EngineUnavailableError, QuireError, RequestError
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.request_stream import RequestStream
from quire.protocol.control import ListPins, Report, Unpin
from quire.protocol.pins import PinnedPrefix
from quire.protocol.request import EngineRequest, FinishReason
from quire.protocol.status import EngineState

__all__ = ["ReplicaPins"]

logger = logging.getLogger("quire")

_Core = tuple[ProcessEngineClient, int | None]
"""A replica, and the number of its core."""

MAX_LOST_CORES = 2
"""Cores that may end while they are given one pin: it may be what ends them."""


@dataclass(slots=True, eq=False)
class _Kept:
    """A pin of all replicas. request: its first request. expires: end on the monotonic clock.
    cores: cores that have it. num_lost_cores: cores that ended while they were given it."""

    request: EngineRequest
    expires: float
    cores: set[_Core]
    num_lost_cores: int = 0


class ReplicaPins:
    """Gives the pins that others hold to a replica that becomes ready: one that starts, takes the
    place of another, or was stalled. What was let go meanwhile, it lets go too."""

    def __init__(
        self,
        replicas: Sequence[ProcessEngineClient],
        on_sent: Callable[[ProcessEngineClient, EngineRequest], None],
    ) -> None:
        """on_sent: called with each replica that gets a request that pins, and the request."""
        self._replicas = tuple(replicas)
        self._on_sent = on_sent
        self._kept: dict[str, _Kept] = {}  # by key
        self._let_go: dict[ProcessEngineClient, set[str]] = {each: set() for each in self._replicas}
        self._lost: dict[str, None] = {}  # keys that a replica did not take, in order
        self._settling: dict[ProcessEngineClient, asyncio.Task[None]] = {}

    # --- what clients ask for -------------------------------------------------------------------

    async def pin(self, request: EngineRequest) -> RequestStream:
        """Pin a prefix in all replicas that are ready, and return the stream of the first one when
        it has ended; or one that failed: then none keeps what has been pinned for this request."""
        pinned: list[tuple[ProcessEngineClient, RequestStream]] = []
        cores: set[_Core] = set()
        failed: list[RequestStream] = []
        key = request.pin_key
        owing = [keys for keys in self._let_go.values() if key in keys]
        for keys in owing:
            keys.remove(key)  # what they have of it may stay now
        try:
            # Others may become ready while some compute.
            while not failed and (lacking := self._ready_beside(cores)):
                for each, instance in lacking:
                    is_first = not pinned
                    handle = request.first_handle if is_first else each.reserve_handles(1)
                    stream = await each.add(replace(request, first_handle=handle))
                    pinned.append((each, stream))
                    cores.add((each, instance))
                    self._on_sent(each, request)
                for _, stream in pinned:
                    await _end_of(stream)
                failed = [stream for _, stream in pinned if not _is_whole(stream)]
        except BaseException:  # whoever waited may be gone
            for keys in owing:
                keys.add(key)
            await _take_back(pinned)
            raise
        if failed:
            for keys in owing:
                keys.add(key)
            await _take_back(pinned)
            return failed[0]
        self._keep(request, cores)
        return pinned[0][1]

    async def list(self) -> Report:
        """Return the pins that all hold which are ready, with the numbers of all of them together.
        One that is yet to be given some is not asked. Lost ones are those that any has lost."""
        reports = await self._list()
        held = _held_by_all([report.pins for _, report in reports])
        lost = {key: None for _, report in reports for key in report.lost_pins} | self._lost
        return replace(reports[0][1], pins=held, lost_pins=tuple(lost))

    async def unpin(self, handle: int) -> Report:
        """Let the prefix go, wherever there is one, that some replica has by this handle."""
        reports = await self._list(is_all=True)
        held = [(each, pin) for each, report in reports for pin in report.pins]
        keys = {pin.key for _, pin in held if pin.handle == handle}
        asked = [each for each, _ in reports]
        for key in keys:
            self._kept.pop(key, None)
            self._lost.pop(key, None)
            for each in self._replicas:
                if each not in asked:
                    self._let_go[each].add(key)
        ops = [each.control(Unpin(pin.handle)) for each, pin in held if pin.key in keys]
        answers = await asyncio.gather(*ops)
        was_there = any(answer.was_there for answer in answers)
        return replace(reports[0][1], was_there=was_there, pins=())

    def forget(self) -> None:
        """Engines have dropped all pins."""
        self._kept.clear()
        self._lost.clear()

    async def _list(self, *, is_all: bool = False) -> list[tuple[ProcessEngineClient, Report]]:
        """Ask for the pins of replicas. is_all: also of those that are yet to be given some."""
        ready = self._in_state(EngineState.READY)
        asked = [] if is_all else [each for each in ready if not self._is_behind(each)]
        asked = asked or ready or self._in_state(EngineState.SLEEPING) or [self._replicas[0]]
        reports = await asyncio.gather(*(each.control(ListPins()) for each in asked))
        return list(zip(asked, reports, strict=True))

    def _in_state(self, state: EngineState) -> list[ProcessEngineClient]:
        return [each for each in self._replicas if each.status.state is state]

    def _ready_beside(self, cores: set[_Core]) -> list[_Core]:
        """Return the cores that are ready, without some."""
        found = [(each, each.instance) for each in self._in_state(EngineState.READY)]
        return [core for core in found if core not in cores]

    def _keep(self, request: EngineRequest, cores: set[_Core]) -> None:
        assert request.pin_seconds is not None
        key = request.pin_key
        expires = time.monotonic() + request.pin_seconds
        if (kept := self._kept.get(key)) is None:
            self._kept[key] = _Kept(request, expires, cores)
        else:
            kept.expires = max(kept.expires, expires)
            kept.cores |= cores
        self._lost.pop(key, None)

    # --- replicas that become ready -------------------------------------------------------------

    def look(self) -> None:
        """Begin to settle the replicas that hold other pins than they should."""
        now = time.monotonic()
        for key in [key for key, kept in self._kept.items() if kept.expires <= now]:
            del self._kept[key]
        for each in self._in_state(EngineState.READY):
            is_due = self._let_go[each] or self._is_behind(each)
            if is_due and each.is_settled and each not in self._settling:
                task = asyncio.create_task(self._settle(each))
                self._settling[each] = task
                task.add_done_callback(lambda _, each=each: self._settling.pop(each))

    async def close(self) -> None:
        """End what runs beside callers."""
        tasks = list(self._settling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_behind(self, replica: ProcessEngineClient) -> bool:
        """Return whether a replica is yet to be given pins."""
        core = (replica, replica.instance)
        return any(core not in kept.cores for kept in self._kept.values())

    async def _settle(self, replica: ProcessEngineClient) -> None:
        """Let go what others have let go, and pin what they hold. The next beat tries again what an
        engine cannot do that goes meanwhile."""
        core = (replica, replica.instance)
        try:
            await self._settle_unpins(replica)
            lacking = [kept for kept in self._kept.values() if core not in kept.cores]
            for kept in await self._still_held(lacking):
                try:
                    await self._give(kept, core)
                except RequestError as error:  # it has no room, say
                    self._lose(kept, str(error))
        except EngineUnavailableError:
            pass
        except QuireError as error:
            logger.warning("a replica does not hold the pins of the others: %s", error)

    async def _settle_unpins(self, replica: ProcessEngineClient) -> None:
        while keys := set(self._let_go[replica]):
            for pin in (await replica.control(ListPins())).pins:
                if pin.key in keys & self._let_go[replica]:
                    await replica.control(Unpin(pin.handle))
            self._let_go[replica] -= keys

    async def _still_held(self, pins: Sequence[_Kept]) -> list[_Kept]:
        """Return those that the replicas still hold which have them, and forget others: a pin may
        be evicted, or lost with a step. What no replica can tell now waits."""
        if not pins:
            return []
        having = [c for c in self._ready_beside(set()) if any(c in kept.cores for kept in pins)]
        reports = await asyncio.gather(*(each.control(ListPins()) for each, _ in having))
        lists = zip(having, reports, strict=True)
        keys = {core: {pin.key for pin in report.pins} for core, report in lists}
        alive = {(each, each.instance) for each in self._replicas}
        found: list[_Kept] = []
        for kept in pins:
            key = kept.request.pin_key
            sources = [core for core in keys if core in kept.cores]
            if sources and all(key in keys[core] for core in sources):
                found.append(kept)
            elif (sources or not kept.cores & alive) and self._kept.get(key) is kept:
                del self._kept[key]
                self._owe_unpin(key)
        return found

    async def _give(self, kept: _Kept, core: _Core) -> None:
        """Pin in one core what others hold."""
        (replica, instance), key = core, kept.request.pin_key
        left = kept.expires - time.monotonic()
        if left <= 0 or self._kept.get(key) is not kept or core in kept.cores:
            return
        handle = replica.reserve_handles(1)
        request = replace(
            kept.request, first_handle=handle, pin_seconds=left, arrival_time=time.monotonic()
        )
        stream = await replica.add(request)
        self._on_sent(replica, request)
        await _end_of(stream)
        if key not in self._kept:  # let go meanwhile, and the stream may have moved
            self._owe_unpin(key)
        elif replica.instance != instance:
            kept.num_lost_cores += 1
            if kept.num_lost_cores >= MAX_LOST_CORES:
                self._lose(kept, "its engine ended each time")
        elif _is_whole(stream):
            kept.cores.add(core)
        else:
            finish = stream.samples[0].finish
            self._lose(kept, (finish and finish.message) or "it was refused")

    def _lose(self, kept: _Kept, why: str) -> None:
        """Let a pin go everywhere that a replica does not take."""
        logger.warning("a replica does not hold the pin %s: %s", kept.request.request_id, why)
        key = kept.request.pin_key
        if self._kept.get(key) is kept:
            del self._kept[key]
            self._owe_unpin(key)
            if kept.request.pin_is_shared:
                self._lost[key] = None

    def _owe_unpin(self, key: str) -> None:
        for owed in self._let_go.values():
            owed.add(key)


async def _end_of(stream: RequestStream) -> None:
    """Wait until a stream has ended, and take nothing from it."""
    came = asyncio.Event()
    stream.listen(came.set)
    try:
        while not stream.is_finished:
            await came.wait()
            came.clear()
    finally:
        stream.listen(None)


def _is_whole(stream: RequestStream) -> bool:
    """Return whether the request was computed to its end."""
    finishes = [sample.finish for sample in stream.samples]
    ends = (FinishReason.STOP, FinishReason.LENGTH)
    return all(finish is not None and finish.reason in ends for finish in finishes)


async def _take_back(pinned: Sequence[tuple[ProcessEngineClient, RequestStream]]) -> None:
    """End requests that pin, and let go what they have pinned; not what others had before. An
    engine that cannot do so now, such as one that is stalled, does it when it can."""
    for _, stream in pinned:
        stream.abort()
    ops = [Unpin(stream.request.first_handle) for _, stream in pinned]
    answers = (each.control(op) for (each, _), op in zip(pinned, ops, strict=True))
    ends = await asyncio.gather(*answers, return_exceptions=True)
    for (each, _), op, end in zip(pinned, ops, ends, strict=True):
        if isinstance(end, EngineUnavailableError):
            each.control_later(op)


def _held_by_all(pins: Sequence[Sequence[PinnedPrefix]]) -> tuple[PinnedPrefix, ...]:
    """Return the pins that are in each list, with the numbers of all of them together."""
    by_key = [{pin.key: pin for pin in each} for each in pins]
    found: list[PinnedPrefix] = []
    for pin in pins[0]:
        if all(pin.key in each for each in by_key):
            same = [each[pin.key] for each in by_key]
            num_blocks, hits = sum(each.num_blocks for each in same), sum(p.hits for p in same)
            seconds_left = min(each.seconds_left for each in same)
            found.append(replace(pin, num_blocks=num_blocks, hits=hits, seconds_left=seconds_left))
    return tuple(found)
