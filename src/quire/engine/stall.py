"""Tells a hung engine core from one that is busy with a long step."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.messages import Heartbeat

__all__ = ["StallLimits", "StallWatch"]


@dataclass(frozen=True, slots=True)
class StallLimits:
    """min_s: no step or silence that is shorter counts as a hang. steps: nor does a step that is
    shorter than so many of the slowest recent ones. start_s: a start may take so long."""

    min_s: float = 60.0
    steps: float = 20.0
    start_s: float = 1800.0


class StallWatch:
    """Follows the heartbeats of one core. No clock of its own: `now` is in seconds."""

    def __init__(self, limits: StallLimits, now: float) -> None:
        """now: when the core was spawned."""
        self._limits = limits
        self._spawned = self._heard = now
        self._beat: Heartbeat | None = None

    def observe(self, beat: Heartbeat, now: float) -> None:
        self._beat, self._heard = beat, now

    @property
    def was_ready(self) -> bool:
        """Whether the start had ended by the last heartbeat."""
        return self._beat is not None and self._beat.is_ready

    def hang(self, now: float) -> str | None:
        """Why the core counts as hung; None while it does not."""
        limits, beat = self._limits, self._beat
        silence = now - self._heard
        if not self.was_ready:  # loading and importing may hold the interpreter for long
            age = now - self._spawned
            return f"it has not started in {age:.1f} s" if age > limits.start_s else None
        if silence > limits.min_s:
            return f"it has said nothing for {silence:.1f} s"
        if beat is None or beat.step_seconds is None:
            return None
        age = beat.step_seconds + silence
        limit = max(limits.min_s, limits.steps * beat.slowest_step_seconds)
        if age <= limit:
            return None
        return f"its present step has taken {age:.1f} s, while {limit:.1f} s are allowed"
