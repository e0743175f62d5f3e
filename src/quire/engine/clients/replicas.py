"""`AsyncEngineClient` of several engines that are alike: a request goes to the one with the least
to do, cached beginnings of prompts considered, and those of an engine that dies go on in another
one, as do those that wait for one that is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from quire.base.errors import EngineUnavailableError
from quire.base.telemetry import EngineStats
from quire.engine.clients.prefix_index import PrefixIndex, prefixes_of
from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.replica_pins import ReplicaPins
from quire.engine.clients.replica_weights import load_everywhere
from quire.engine.clients.request_stream import RequestStream
from quire.protocol.control import (
    AdminOp,
    ListPins,
    LoadWeights,
    Pause,
    Report,
    Resume,
    Sleep,
    Unpin,
    Wake,
)
from quire.protocol.media import ImageData, MediaInfo
from quire.protocol.request import EngineRequest
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus, merge_views
from quire.protocol.step import IntArray

__all__ = ["ReplicatedClient"]

_BY_WORTH = (
    EngineState.READY,
    EngineState.SLEEPING,
    EngineState.STALLED,
    EngineState.DRAINING,
    EngineState.RESTARTING,
    EngineState.STARTING,
    EngineState.DEAD,
)
"""The state of all is that of the best one."""

CACHED_WEIGHT: Final = 0.25
"""Weight of a cached token of a prompt against one in flight. It is small, as most of those are of
outputs, which take longer than a prompt's, and as a replica that has nothing to do shall get
something: it has the prompt too then."""


class ReplicatedClient:
    """replicas: clients of one id, with one counter of handles, of engines with equal settings and
    kernels: a stream that moves continues to the byte. has_cache: whether engines keep computed
    prompts for others that begin alike."""

    def __init__(self, replicas: Sequence[ProcessEngineClient], *, has_cache: bool = True) -> None:
        self._replicas = tuple(replicas)
        self._has_cache = has_cache
        self._prefixes = {each: PrefixIndex() for each in self._replicas}
        self._turn = 0
        self._pins = ReplicaPins(
            self._replicas, lambda each, request: self._note(each, prefixes_of(request))
        )
        for each in self._replicas:
            each.on_core_lost = partial(self._move, each)
            each.on_beat = self._look

    def reserve_handles(self, count: int) -> int:
        return self._replicas[0].reserve_handles(count)

    async def add(self, request: EngineRequest) -> RequestStream:
        """Send a request to one replica; one that pins its prompt to all that are ready, and then
        this returns when it has ended there."""
        if request.pin_seconds is None or not self._in_state(EngineState.READY):
            return await self._choose(request).add(request)
        return await self._pins.pin(request)

    def _choose(self, request: EngineRequest) -> ProcessEngineClient:
        """The ready replica with the fewest tokens to compute, less for one that has computed what
        the prompt begins with; ties go round. The first one, which says why not, if none is
        ready."""
        ready = self._at_work or self._in_state(EngineState.READY)
        if not ready:
            return min(self._replicas, key=_worth)
        self._turn += 1
        start = self._turn % len(ready)
        names = prefixes_of(request) if self._has_cache else []

        def busyness(replica: ProcessEngineClient) -> float:
            num_cached = self._prefixes[replica].num_known(names)
            return replica.tokens_in_flight - CACHED_WEIGHT * num_cached

        chosen = min([*ready[start:], *ready[:start]], key=busyness)
        self._note(chosen, names)
        return chosen

    def _note(self, replica: ProcessEngineClient, names: Sequence[bytes]) -> None:
        capacity = replica.status.capacity
        if capacity is not None:
            self._prefixes[replica].note(names, capacity.capacity_tokens)

    def _move(self, lost: ProcessEngineClient) -> None:
        """The core of a replica is gone: others take its streams, if there are any. What may have
        been the cause waits for the next core there, where it is tried alone."""
        self._prefixes[lost].clear()
        if not self._in_state(EngineState.READY):
            return
        for stream in lost.let_go():
            self._choose(stream.request).take_over(stream)

    def _look(self) -> None:
        self._relieve()
        self._pins.look()

    def _relieve(self) -> None:
        """Have others serve what has not begun in a replica that is stuck, which may go on or be
        replaced a minute later."""
        for stuck in self._replicas:
            if stuck.is_stuck and self._at_work:
                for stream in stuck.let_waiting_go():
                    self._choose(stream.request).take_over(stream)

    @property
    def _at_work(self) -> list[ProcessEngineClient]:
        return [each for each in self._in_state(EngineState.READY) if not each.is_stuck]

    def _in_state(self, *states: EngineState) -> list[ProcessEngineClient]:
        return [each for each in self._replicas if each.status.state in states]

    async def put_media(
        self, handle: int, data: bytes | ImageData, *, is_spare: bool = False
    ) -> MediaInfo:
        """To all replicas, since any may take the request, or take it over: also those that are
        ready later. If one of several dies meanwhile, the others are enough."""
        ready = self._in_state(EngineState.READY) or list(self._replicas[:1])
        is_only = len(ready) == 1
        puts = [
            asyncio.ensure_future(
                (each.put_media if is_only else each.put_media_once)(
                    handle, data, is_spare=is_spare
                )
            )
            for each in ready
        ]
        left = set(puts)
        try:
            while left:
                ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for put in ended:
                    if not isinstance(put.exception(), EngineUnavailableError):
                        put.result()
        finally:
            for put in puts:  # one has failed: nobody answers for what is dropped meanwhile
                put.cancel()
        having = [each for each, put in zip(ready, puts, strict=True) if put.exception() is None]
        if not having:
            return puts[0].result()  # raises
        for each in self._replicas:
            if each not in having:
                each.keep_media(handle, data)
        return next(put.result() for put in puts if put.exception() is None)

    def drop_media(self, handles: Iterable[int]) -> None:
        dropped = list(handles)
        for each in self._replicas:
            each.drop_media(dropped)

    def abort(self, handles: Iterable[int]) -> None:
        ended = list(handles)
        for each in self._replicas:
            each.abort(ended)

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        for each in self._replicas:
            each.extend(handle, token_ids, is_last=is_last)

    def awaits_prompt(self, handle: int) -> bool:
        """See `ProcessEngineClient.awaits_prompt`."""
        return any(each.awaits_prompt(handle) for each in self._replicas)

    async def control(self, op: AdminOp) -> Report:
        """On all replicas that can; their answers in one. A pause or sleep, or its end, is carried
        out by the others when they can; paused or asleep is what all are. The blocks and facts of
        all are theirs. Maps of blocks follow one another. Pins: see `ReplicaPins`. Weights: see
        `load_everywhere`."""
        if isinstance(op, LoadWeights):
            return await self._load(op)
        if isinstance(op, ListPins):
            return await self._pins.list()
        if isinstance(op, Unpin):
            return await self._pins.unpin(op.handle)
        usable = self._in_state(EngineState.READY, EngineState.SLEEPING)
        reports = await asyncio.gather(*(each.control(op) for each in usable or self._replicas[:1]))
        if isinstance(op, Sleep):
            self._pins.forget()
        if isinstance(op, Pause | Resume | Sleep | Wake):
            for each in self._replicas:
                if each not in usable:
                    each.control_later(op)
        return replace(
            reports[0],
            blocks=b"".join(report.blocks for report in reports),
            view=merge_views([(each.view, len(each.blocks)) for each in reports if each.view]),
            facts=tuple(
                replace(fact, core=core)
                for core, report in enumerate(reports)
                for fact in report.facts
            ),
            was_there=any(report.was_there for report in reports),
            is_paused=all(report.is_paused for report in reports),
            sleep_level=min(report.sleep_level for report in reports),
        )

    async def _load(self, op: LoadWeights) -> Report:
        report = await load_everywhere(self._replicas, op)
        if not op.is_trial:
            self._pins.forget()
        return report

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(path for each in self._replicas for path in each.directories)

    @property
    def status(self) -> EngineStatus:
        """The best one, with the capacity of all that are ready together."""
        best = min(self._replicas, key=_worth).status
        ready = [each.status.capacity for each in self._in_state(EngineState.READY)]
        return replace(
            best,
            capacity=_summed([each for each in ready if each is not None]) or best.capacity,
            restarts=sum(each.status.restarts for each in self._replicas),
        )

    @property
    def stats(self) -> EngineStats:
        readings = [each.stats for each in self._replicas]
        return EngineStats(
            **{
                item.name: _joined([getattr(reading, item.name) for reading in readings])
                for item in fields(EngineStats)
            }
        )

    @property
    def num_unfinished(self) -> int:
        return sum(each.num_unfinished for each in self._replicas)

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        known = [each.status for each in self._replicas]
        while _shown(self.status) == _shown(status):
            waiting = [
                asyncio.ensure_future(each.wait_for_change(was))
                for each, was in zip(self._replicas, known, strict=True)
            ]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
            known = [each.status for each in self._replicas]
        return self.status

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(each.drain(timeout_s) for each in self._replicas))

    async def close(self) -> None:
        for each in self._replicas:
            each.on_core_lost = each.on_beat = None
        await self._pins.close()
        await asyncio.gather(*(each.close() for each in self._replicas))

    def engine_died(self, message: str) -> None:
        """No core will come any more, for any replica."""
        for each in self._replicas:
            each.engine_died(message)


def _worth(replica: ProcessEngineClient) -> int:
    return _BY_WORTH.index(replica.status.state)


def _summed(capacities: Sequence[EngineCapacity]) -> EngineCapacity | None:
    """Return the capacity of engines together, None if there are none. A request goes to any of
    them, so a sequence may be no longer than the least of them allows."""
    if not capacities:
        return None
    return replace(
        capacities[0],
        max_model_len=min(each.max_model_len for each in capacities),
        max_num_seqs=sum(each.max_num_seqs for each in capacities),
        num_blocks=sum(each.num_blocks for each in capacities),
        capacity_tokens=sum(each.capacity_tokens for each in capacities),
        kv_store=max(each.kv_store for each in capacities),
    )


def _shown(status: EngineStatus) -> tuple[object, ...]:
    """Return what a status says but for the time that goes by."""
    phases = tuple((phase.name, phase.is_done) for phase in status.phases)
    return status.state, status.capacity, status.restarts, phases


def _joined(values: Sequence[Any]) -> Any:
    """Numbers are added, counts by bucket too; names are listed once."""
    if not isinstance(values[0], tuple):
        return sum(values)
    if any(isinstance(item, str) for value in values for item in value):
        return tuple(sorted({item for value in values for item in value}))
    # A replica counts accepted drafts up to the last place that it has seen.
    return tuple(map(sum, zip_longest(*values, fillvalue=0)))
