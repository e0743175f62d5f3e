"""A client's knowledge of its engine's state, from heartbeats and from its connection."""

from __future__ import annotations

import asyncio
import time

from quire.base.telemetry import EngineStats
from quire.protocol.control import asleep
from quire.protocol.messages import Heartbeat, Welcome
from quire.protocol.status import (
    CORE_STARTS,
    EngineCapacity,
    EngineState,
    EngineStatus,
    StartPhase,
)

__all__ = ["EngineWatch"]

STUCK_STEPS = 4.0
"""A step is no stuck one unless it has taken so many of the slowest recent ones."""


class EngineWatch:
    """Tracks the state of an engine. Each method that is not a reading reports an event. For one
    event loop."""

    def __init__(self, stalled_step_s: float, stuck_step_s: float) -> None:
        """stalled_step_s: a core counts as stalled after so long in one step. stuck_step_s: no
        shorter step holds up those who wait."""
        self._stalled_step_s = stalled_step_s
        self._stuck_step_s = stuck_step_s
        self._beat: Heartbeat | None = None
        self._is_silent = False
        self._instance: int | None = None
        self._capacity: EngineCapacity | None = None
        self._was_connected = False
        self._start_began = time.monotonic()
        self._is_draining = False
        self._death = ""
        self._sleep = (0, 0, 0)  # of which core, after how many operations, how deep
        self._shown = self._key()
        self._changed = asyncio.Event()

    def beat(self, heartbeat: Heartbeat | None) -> None:
        """A heartbeat, or None when none has come for too long."""
        self._is_silent = heartbeat is None
        if heartbeat is not None:
            self._beat = heartbeat
            self._note_sleep(heartbeat.instance, heartbeat.state_version, heartbeat.sleep_level)
        self._notify()

    def answered(self, state_version: int, sleep_level: int) -> None:
        """The core has carried out an operation."""
        if self._instance is not None:
            self._note_sleep(self._instance, state_version, sleep_level)
        self._notify()

    def _note_sleep(self, instance: int, version: int, level: int) -> None:
        self._sleep = max(self._sleep, (instance, version, level))

    def connected(self, welcome: Welcome) -> None:
        self._instance, self._capacity = welcome.instance, welcome.capacity
        self._is_silent = False
        self._note_sleep(welcome.instance, welcome.state_version, welcome.sleep_level)
        self._was_connected = True
        self._notify()

    def disconnected(self) -> None:
        self._instance = None
        self._start_began = time.monotonic()
        self._notify()

    def draining(self) -> None:
        self._is_draining = True
        self._notify()

    def died(self, message: str) -> None:
        """Note that no core will come any more."""
        self._death = self._death or message
        self._notify()

    # --- readings -------------------------------------------------------------------------------

    @property
    def instance(self) -> int | None:
        """Number of the core that is connected."""
        return self._instance

    @property
    def _present(self) -> Heartbeat | None:
        """The latest beat, if it is of the core that is connected: the step, the drain and the
        figures of one that has gone are not those of the next."""
        beat = self._beat
        return beat if beat is not None and beat.instance == self._instance else None

    @property
    def is_silent(self) -> bool:
        """True if a core is there and has not been heard for too long."""
        return self._is_silent and self._instance is not None

    @property
    def is_stuck(self) -> bool:
        """True if it is silent, or its step takes far longer than others: a request that has not
        begun does better elsewhere."""
        beat = self._present
        if beat is None:
            return self.is_silent
        longest = max(self._stuck_step_s, STUCK_STEPS * beat.slowest_step_seconds)
        return self._is_silent or (beat.step_seconds or 0.0) > longest

    @property
    def sleep_level(self) -> int:
        """Sleep level of the core that is connected."""
        instance, _, level = self._sleep
        return level if instance == self._instance else 0

    @property
    def stats(self) -> EngineStats:
        """Return the latest reading. What it says of the moment is of the past if its core has
        gone."""
        stats = EngineStats() if self._beat is None else self._beat.stats
        return stats.without_moment() if self._present is None else stats

    @property
    def status(self) -> EngineStatus:
        state, message = self._state()
        beat = self._beat
        return EngineStatus(
            state=state,
            phases=self._phases(state),
            capacity=self._capacity,
            restarts=0 if beat is None else max(beat.instance, self._instance or 0),
            message=message,
        )

    def _phases(self, state: EngineState) -> tuple[StartPhase, ...]:
        """Return the phases of the latest beat; while a core starts, the last one is not done."""
        phases = () if self._beat is None else self._beat.phases
        is_start = state in (EngineState.STARTING, EngineState.RESTARTING)
        if not is_start or (phases and not phases[-1].is_done):
            return phases
        seconds = time.monotonic() - self._start_began
        return (*phases, StartPhase(CORE_STARTS, seconds, is_done=False))

    def _state(self) -> tuple[EngineState, str]:
        beat, present = self._beat, self._present
        if self._death:
            return EngineState.DEAD, self._death
        if self._is_draining or (present is not None and present.is_draining):
            return EngineState.DRAINING, "the engine is shutting down"
        if self._instance is None:
            phase = CORE_STARTS
            if beat is not None and beat.phases and not beat.phases[-1].is_done:
                phase = beat.phases[-1].name
            if self._was_connected:
                return EngineState.RESTARTING, f"the engine is restarting ({phase})"
            return EngineState.STARTING, f"the engine is starting ({phase})"
        if self._is_silent:
            return EngineState.STALLED, "the engine core does not respond"
        if present is not None and (present.step_seconds or 0.0) > self._stalled_step_s:
            return EngineState.STALLED, f"the present step has taken {present.step_seconds:.0f} s"
        if self.sleep_level:
            return EngineState.SLEEPING, asleep(self.sleep_level)
        return EngineState.READY, ""

    # --- waiting --------------------------------------------------------------------------------

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        """Wait until the state, a phase, the capacity or the number of restarts differs."""
        while _key(status) == self._key():
            await self._changed.wait()
        return self.status

    def _key(self) -> tuple[object, ...]:
        return _key(self.status)

    def _notify(self) -> None:
        key = self._key()
        if key != self._shown:
            self._shown = key
            self._changed.set()
            self._changed = asyncio.Event()


def _key(status: EngineStatus) -> tuple[object, ...]:
    phases = tuple((phase.name, phase.is_done) for phase in status.phases)
    return status.state, status.capacity, status.restarts, phases
