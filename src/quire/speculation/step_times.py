"""Times of steps by their number of tokens, as measured while they run."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

__all__ = ["DecodeStep", "StepTimes"]

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Tokens of steps that have a time of their own; others go with the nearest larger size."""

FLAT_TOKENS, TOKENS_PER_STEP = 8, 13
"""Shape of times that is assumed before any is measured: up to so many tokens take as long as one,
and from there each one of so many more. About as Qwen3-0.6B in 8 bits on two cores of a Zen 4."""

DRAFTED = 1.08
"""Factor by which a step with drafts is assumed to take longer than one without."""

RATE = 0.25
"""Weight of the last measurement."""

OUTLIER = 3.0
"""A step that took so many times as long as expected waited for something else."""

SURE, STALE = 2, 256
"""A time stands for itself after so many measurements, the last of them at most so many steps ago.
Else it may be too long without anybody noticing, since steps that seem slow are not planned."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """num_tokens: drafts included. counts: whether its time is one of decoding."""

    num_tokens: int
    is_drafted: bool
    counts: bool


@dataclass(slots=True)
class _Time:
    """seconds: of `count` measurements; the last one is that of step number `last`."""

    seconds: float
    count: int
    last: int


def _shape(num_tokens: int, is_drafted: bool) -> float:
    """Time of a step, in those of one token without drafts."""
    seconds = 1.0 + max(0, num_tokens - FLAT_TOKENS) / TOKENS_PER_STEP
    return seconds * DRAFTED if is_drafted else seconds


class StepTimes:
    """The time of a step behind another one is what its result says that it computed. Where that is
    not known, or plans wait for results, it is the time between the plans before and after the
    result: so what happens on the host between steps counts where nothing hides it."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool], _Time] = {}  # by size, and whether it has drafts
        self._num_steps = 0
        self._in_flight: deque[DecodeStep | None] = deque()  # None: planned before times were kept
        self._applied: list[tuple[DecodeStep | None, float]] = []
        self._last_plan: float | None = None
        self._wait = 0.0  # seconds that the next step with drafts has cost before it began

    def planned(
        self, now: float, step: DecodeStep, *, num_before: int, has_waited: bool = False
    ) -> None:
        """A step is planned. now: seconds. num_before: steps in flight before it, of which the
        first may have been planned before times were kept. has_waited: whether it could have been
        planned earlier, and waited for results."""
        while len(self._in_flight) < num_before:
            self._in_flight.appendleft(None)
        if self._last_plan is not None:
            self._passed(now - self._last_plan, has_waited=has_waited)
        self._applied.clear()
        self._last_plan = now
        self._in_flight.append(step)

    def _passed(self, seconds: float, *, has_waited: bool) -> None:
        """So long after the last plan comes the next one. The wait before a step with drafts is a
        part of what these cost, and the steps that were waited for are none without it."""
        steps = [step for step, _ in self._applied if step is not None and step.counts]
        if len(steps) < len(self._applied):
            self._wait = 0.0
            return
        if has_waited and not any(step.is_drafted for step in steps):
            expected = sum(self.expected(step.num_tokens, False) for step in steps)
            self._wait = min(max(seconds - expected, 0.0), expected)
        elif len(steps) == 1:
            computed = self._applied[0][1]
            if not has_waited and computed > 0.0:
                seconds = computed  # plans are late when others have the host's cores
            if steps[0].is_drafted:
                seconds += self._wait
            self._wait = 0.0  # it was for nothing if no drafts followed
            self._measured(steps[0], seconds)

    def applied(self, seconds: float = 0.0) -> None:
        """The result of the oldest step has come. seconds: that it computed, 0 if nobody knows."""
        self._applied.append((self._in_flight.popleft(), seconds))

    @property
    def oldest(self) -> DecodeStep | None:
        """The step whose result comes next, None if nothing is known of it."""
        return self._in_flight[0] if self._in_flight else None

    def idle(self) -> None:
        """No step follows at once: the time up to the next plan is not that of a step."""
        self._last_plan = None

    def lost(self) -> None:
        """The steps in flight have no results, or nobody is told of them."""
        self._in_flight.clear()
        self._applied.clear()
        self._last_plan = None
        self._wait = 0.0

    def _measured(self, step: DecodeStep, seconds: float) -> None:
        self._num_steps += 1
        if seconds <= 0.0:
            return
        key = self._size(step.num_tokens), step.is_drafted
        known = self._times.get(key)
        if known is None or self._is_stale(known):
            self._times[key] = _Time(seconds, 1, self._num_steps)
            return
        if known.count < SURE:
            known.seconds = min(known.seconds, seconds)
        else:
            excess = min(seconds, OUTLIER * known.seconds) - known.seconds
            known.seconds += RATE * excess
        known.count += 1
        known.last = self._num_steps

    def _is_stale(self, known: _Time) -> bool:
        return self._num_steps - known.last > STALE

    def _size(self, num_tokens: int) -> int:
        index = bisect_left(SIZES, num_tokens)
        return SIZES[index] if index < len(SIZES) else num_tokens

    def expected(self, num_tokens: int, is_drafted: bool) -> float:
        """Seconds of a step of so many tokens, or a multiple of it where none was measured."""
        size = self._size(num_tokens)
        known = self._times.get((size, is_drafted))
        if known is None:
            return self._scaled(size, is_drafted)
        if known.count >= SURE and not self._is_stale(known):
            return known.seconds
        return min(known.seconds, self._scaled(size, is_drafted))

    def drafted(self, num_tokens: int, count: int) -> list[float]:
        """Seconds of steps with drafts that have num_tokens + 1, num_tokens + 2, … tokens: `count`
        of them."""
        sizes = [self._size(num_tokens + 1 + i) for i in range(count)]
        by_size = {size: self.expected(size, True) for size in set(sizes)}
        return [by_size[size] for size in sizes]

    def knows(self, num_tokens: int) -> bool:
        """Return whether steps of so many tokens without drafts were measured, not long ago."""
        known = self._times.get((self._size(num_tokens), False))
        return known is not None and known.count >= SURE and not self._is_stale(known)

    def _scaled(self, size: int, is_drafted: bool) -> float:
        """Made from the nearest of the times that were measured last."""
        times = {key: each for key, each in self._times.items() if key != (size, is_drafted)}
        fresh = [key for key, each in times.items() if not self._is_stale(each)]
        keys = fresh or list(times)
        if not keys:
            only = self._times.get((size, is_drafted))
            return _shape(size, is_drafted) if only is None else only.seconds
        near = min(keys, key=lambda key: (key[1] != is_drafted, abs(key[0] - size)))
        return times[near].seconds * _shape(size, is_drafted) / _shape(*near)
