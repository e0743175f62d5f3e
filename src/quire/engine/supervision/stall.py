"""Tells a hung engine core from one that is busy with a long step."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.messages import Heartbeat
from quire.protocol.status import CORE_STARTS, FETCHING

__all__ = ["StallLimits", "StallWatch"]

MAX_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """min_s: no step or silence that is shorter counts as a hang. steps: nor does a step that is
    shorter than so many of the slowest recent ones. start_silence_s: limit of a silence before the
    core is ready, while imports hold the interpreter. phase_s: limit of each phase of a start,
    except the one that fetches a checkpoint, which a network makes as long as it likes."""

    min_s: float = 60.0
    steps: float = 20.0
    start_silence_s: float = 60.0
    phase_s: float = 1800.0


class StallWatch:
    """Follows the heartbeats of one core. No clock of its own: `now` is in seconds."""

    def __init__(self, limits: StallLimits, now: float) -> None:
        """now: time of the core's spawn."""
        self._limits = limits
        self._spawned = self._heard = self._looked = now
        self._beat: Heartbeat | None = None

    def observe(self, beat: Heartbeat, now: float) -> None:
        self._beat, self._heard = beat, now

    def hang(self, now: float) -> str | None:
        """Why the core counts as hung; None while it does not. To be asked often: time in which
        this process slept itself does not count against the core."""
        limits, beat = self._limits, self._beat
        slept = max(now - self._looked - MAX_LOOK_INTERVAL_S, 0.0)
        self._spawned, self._heard, self._looked = self._spawned + slept, self._heard + slept, now
        silence = now - self._heard
        is_ready = beat is not None and beat.is_ready
        if silence > (limits.min_s if is_ready else limits.start_silence_s):
            return f"it has said nothing for {silence:.1f} s"
        if beat is None:
            return None
        if not beat.is_ready:
            return self._unending_phase(beat, now)
        if beat.step_seconds is None:
            return None
        age = beat.step_seconds + silence
        limit = max(limits.min_s, limits.steps * beat.slowest_step_seconds)
        if age <= limit:
            return None
        return f"its present step has taken {age:.1f} s, while {limit:.1f} s are allowed"

    def _unending_phase(self, beat: Heartbeat, now: float) -> str | None:
        """Return a reason if the present phase of the start takes too long."""
        name, age, limit = CORE_STARTS, now - self._spawned, self._limits.phase_s
        if beat.phases:
            name, age = beat.phases[-1].name, beat.phases[-1].seconds + now - self._heard
        if name == FETCHING or age <= limit:
            return None
        return f"it has not started: {name!r} has taken {age:.1f} s, {limit:.1f} s are allowed"
