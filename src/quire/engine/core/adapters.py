"""Slots of adapters: their holders, and the queue for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.base.errors import RequestError
from quire.protocol.adapters import AdapterRef

__all__ = ["AdapterSlots"]

MAX_PASSES = 64
"""Requests that may overtake one that finds no slot, because their adapters have slots. After that,
slots are left to drain."""


@dataclass(slots=True)
class _Slot:
    """ref: adapter that the slot has, or gets. done: ends when the slot has it."""

    ref: AdapterRef
    done: Future[None]
    last_used: int


@dataclass(slots=True)
class _Waiting:
    ref: AdapterRef
    opened: Future[int]
    num_passes: int = 0


class AdapterSlots:
    """Gives slots to adapters in the order in which requests ask. The least recently used adapter
    without requests loses its slot first."""

    def __init__(
        self,
        num_slots: int,
        put: Callable[[int, AdapterRef], Future[None]],
        in_use: Callable[[], Set[int]],
    ) -> None:
        """put: see `Executor.put_adapter`. in_use: slots of requests that have not ended, each
        counted from 1."""
        self._num_slots = num_slots
        self._put = put
        self._in_use = in_use
        self._slots: dict[int, _Slot] = {}
        self._waiting: list[_Waiting] = []
        self._clock = 0

    def open(self, ref: AdapterRef) -> Future[int]:
        """Ask for an adapter. The future gives its slot, counted from 1, at one of the next calls
        of `poll`; it raises RequestError if the adapter cannot be used."""
        waiting = _Waiting(ref, Future())
        self._waiting.append(waiting)
        return waiting.opened

    def poll(self) -> None:
        """Give slots to waiting requests. A request that gets one must count as a user of it before
        the next call."""
        if not self._waiting:
            return
        busy = set(self._in_use())
        left: list[_Waiting] = []
        for waiting in self._waiting:
            if waiting.opened.cancelled():
                continue
            is_held_up = bool(left) and left[0].num_passes >= MAX_PASSES
            if is_held_up or not self._serve(waiting, busy):
                left.append(waiting)
            elif left:
                left[0].num_passes += 1
        self._waiting = left

    def stats(self) -> Mapping[str, Any]:
        """Return the fields of `EngineStats` on adapters."""
        in_use = self._in_use()
        running = {slot.ref.name for i, slot in self._slots.items() if i in in_use}
        waiting = {each.ref.name for each in self._waiting}
        return {
            "max_adapters": self._num_slots,
            "running_adapters": tuple(sorted(running)),
            "waiting_adapters": tuple(sorted(waiting)),
        }

    def _serve(self, waiting: _Waiting, busy: set[int]) -> bool:
        """Return whether this request need not wait any more. busy: slots that must not be given
        away."""
        found = self._slot_of(waiting.ref.digest)
        if found is None:
            self._begin(waiting.ref, busy)
            return False
        slot = self._slots[found]
        busy.add(found)
        if not slot.done.done():
            return False
        error = slot.done.exception()
        if error is not None:
            del self._slots[found]
            waiting.opened.set_exception(error)
            return True
        self._clock += 1
        slot.last_used = self._clock
        waiting.opened.set_result(found)
        return True

    def _slot_of(self, digest: str) -> int | None:
        return next((i for i, slot in self._slots.items() if slot.ref.digest == digest), None)

    def _begin(self, ref: AdapterRef, busy: set[int]) -> None:
        """Read an adapter into a slot, if there is one for it."""
        free = [i for i in range(1, self._num_slots + 1) if i not in self._slots]
        idle = [i for i, slot in self._slots.items() if i not in busy and slot.done.done()]
        if not free and not idle:
            return
        chosen = free[0] if free else min(idle, key=lambda i: self._slots[i].last_used)
        try:
            done = self._put(chosen - 1, ref)
        except RequestError as error:
            done = Future[None]()
            done.set_exception(error)
        busy.add(chosen)
        self._slots[chosen] = _Slot(ref, done, self._clock)
