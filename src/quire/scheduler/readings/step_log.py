"""The last steps, noted while somebody looks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from quire.protocol.status import ViewedStep

__all__ = ["PlannedStep", "StepLog"]

MAX_STEPS = 256
"""Steps that are kept."""

WATCH_S = 5.0
"""Seconds after a look for which steps are noted."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """number: from 1. decode, prefill: tokens behind prompts, and of prompts. evicted_total: blocks
    that the pool has evicted so far. now: time of the plan."""

    number: int
    decode: int
    prefill: int
    rows: int
    num_drafts: int
    evicted_total: int
    now: float


@dataclass(frozen=True, slots=True)
class _Ended:
    step: PlannedStep
    evicted: int
    accepted: int
    seconds: float


class StepLog:
    """Tokens of each step by kind, and its time. Costs two comparisons for each step while nobody
    looks."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._planned: deque[tuple[PlannedStep, int] | None] = deque()
        self._ended: deque[_Ended] = deque(maxlen=MAX_STEPS)
        self._evicted_total = 0
        self._accepted_total = 0

    def watch(self, now: float, evicted_total: int) -> None:
        """Note the steps that are planned in the next `WATCH_S` seconds."""
        if now > self._until:
            self._ended.clear()
            self._evicted_total = evicted_total
        self._until = now + WATCH_S

    def is_watched(self, now: float) -> bool:
        """Return whether `planned` wants the numbers of the step."""
        if now <= self._until:
            return True
        self._planned.append(None)
        return False

    def planned(self, step: PlannedStep) -> None:
        """Note a step."""
        evicted = step.evicted_total - self._evicted_total
        self._evicted_total = step.evicted_total
        self._planned.append((step, evicted))

    def applied(self, seconds: float, accepted_total: int) -> None:
        """The oldest step has ended. accepted_total: drafts that were accepted so far."""
        accepted = accepted_total - self._accepted_total
        self._accepted_total = accepted_total
        noted = self._planned.popleft()
        if noted is not None:
            step, evicted = noted
            self._ended.append(_Ended(step, evicted, min(accepted, step.num_drafts), seconds))

    def lost(self) -> None:
        """The steps in flight are lost."""
        self._planned.clear()

    def steps(self, now: float, max_age_s: float) -> tuple[ViewedStep, ...]:
        """Return the steps that are kept and were planned so lately, oldest first."""
        return tuple(
            ViewedStep(
                number=step.number,
                decode=step.decode,
                prefill=step.prefill,
                accepted=ended.accepted,
                wasted=step.num_drafts - ended.accepted,
                rows=step.rows,
                evicted=ended.evicted,
                ms=round(1000 * ended.seconds, 3),
                age_s=round(now - step.now, 3),
            )
            for ended in self._ended
            for step in (ended.step,)
            if now - step.now <= max_age_s
        )
