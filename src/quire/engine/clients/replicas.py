"""`AsyncEngineClient` of several engines that are alike: a request goes to the one with the least
to do, and those of an engine that dies go on in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from quire.engine.clients.process_client import ProcessEngineClient
from quire.engine.clients.request_stream import RequestStream
from quire.protocol.control import AdminOp, Report
from quire.protocol.media import MediaInfo
from quire.protocol.request import EngineRequest
from quire.protocol.status import EngineCapacity, EngineState, EngineStatus
from quire.protocol.step import IntArray
from quire.telemetry import EngineStats

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


class ReplicatedClient:
    """replicas: clients of one id, with one counter of handles, of engines with equal settings and
    kernels: a stream that moves continues to the byte."""

    def __init__(self, replicas: Sequence[ProcessEngineClient]) -> None:
        self._replicas = tuple(replicas)
        self._turn = 0
        for each in self._replicas:
            each.on_core_lost = partial(self._move, each)

    def reserve_handles(self, count: int) -> int:
        return self._replicas[0].reserve_handles(count)

    async def add(self, request: EngineRequest) -> RequestStream:
        return await self._least_busy().add(request)

    def _least_busy(self) -> ProcessEngineClient:
        """The ready replica with the fewest tokens to compute; ties go round. The first one, which
        says why not, if none is ready."""
        ready = self._in_state(EngineState.READY)
        if not ready:
            return min(self._replicas, key=_worth)
        self._turn += 1
        start = self._turn % len(ready)
        return min([*ready[start:], *ready[:start]], key=lambda each: each.tokens_in_flight)

    def _move(self, lost: ProcessEngineClient) -> None:
        """The core of a replica is gone: others take its streams, if there are any. What may have
        been the cause waits for the next core there, where it is tried alone."""
        if not self._in_state(EngineState.READY):
            return
        for stream in lost.let_go():
            self._least_busy().take_over(stream)

    def _in_state(self, *states: EngineState) -> list[ProcessEngineClient]:
        return [each for each in self._replicas if each.status.state in states]

    async def put_media(self, handle: int, data: bytes) -> MediaInfo:
        """To all replicas, since any may take the request, or take it over."""
        ready = self._in_state(EngineState.READY) or list(self._replicas[:1])
        found = await asyncio.gather(*(each.put_media(handle, data) for each in ready))
        return found[0]

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
        """On all replicas that can; their answers in one."""
        usable = self._in_state(EngineState.READY, EngineState.SLEEPING)
        reports = await asyncio.gather(*(each.control(op) for each in usable or self._replicas[:1]))
        return replace(
            reports[0],
            was_there=any(report.was_there for report in reports),
            pins=tuple(pin for report in reports for pin in report.pins),
        )

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
            each.on_core_lost = None
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
    return tuple(map(sum, zip(*values, strict=True)))
