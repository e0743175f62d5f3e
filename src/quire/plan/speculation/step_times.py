"""Durations of steps by their number of tokens, measured while the engine runs."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

__all__ = ["DecodeStep", "StepTimes"]

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Sizes with a time of their own; other steps count as the next larger size."""

FLAT_TOKENS, TOKENS_PER_STEP = 8, 13
"""Assumed shape before any measurement: constant up to this many tokens, then proportional. About
that of Qwen3-0.6B in 8 bits on two cores of a Zen 4."""

DRAFTED = 1.08
"""Assumed ratio of a step's time with drafts to its time without."""

RATE = 0.25
"""Weight of the newest measurement."""

OUTLIER = 3.0
"""Longer times than this many times the expected one count as this many: such a step waited for
something else."""

SURE, STALE = 2, 256
"""Measurements that a time needs, and the most steps since the last of them. Older times may be too
long without anybody noticing, since slow steps are no longer planned."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """num_tokens: including drafts. counts: True if the step only decodes."""

    num_tokens: int
    is_drafted: bool
    counts: bool


@dataclass(slots=True)
class _Time:
    """seconds: estimate from `count` measurements. last: number of the step measured last."""

    seconds: float
    count: int
    last: int


def _shape(num_tokens: int, is_drafted: bool) -> float:
    """Durations of steps, relative to one token without drafts."""
    seconds = 1.0 + max(0, num_tokens - FLAT_TOKENS) / TOKENS_PER_STEP
    return seconds * DRAFTED if is_drafted else seconds


class StepTimes:
    """Measures steps.

    For a step behind another one, the result states how long it computed. Where no result does, or
    plans wait for results, the time between the plans before and after the result is taken, so work
    of the host between steps counts where nothing hides it.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool], _Time] = {}  # by size and whether there are drafts
        self._num_steps = 0
        self._in_flight: deque[DecodeStep | None] = deque()  # None: planned before times were kept
        self._applied: list[tuple[DecodeStep | None, float]] = []
        self._last_plan: float | None = None
        self._wait = 0.0  # seconds that the next step with drafts cost before it began

    def planned(
        self, now: float, step: DecodeStep, *, num_before: int, has_waited: bool = False
    ) -> None:
        """A step is planned.

        now: seconds. num_before: steps in flight before it; the first may have been planned before
        times were kept. has_waited: True if it could have been planned earlier and waited for
        results.
        """
        while len(self._in_flight) < num_before:
            self._in_flight.appendleft(None)
        if self._last_plan is not None:
            self._passed(now - self._last_plan, has_waited=has_waited)
        self._applied.clear()
        self._last_plan = now
        self._in_flight.append(step)

    def _passed(self, seconds: float, *, has_waited: bool) -> None:
        """Note the time between the last plan and this one. A wait that precedes a step with drafts
        is added to that step's time."""
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
                seconds = computed  # plans are late when other processes have the host's cores
            if steps[0].is_drafted:
                seconds += self._wait
            self._wait = 0.0  # wasted if no drafts followed
            self._measured(steps[0], seconds)

    def applied(self, seconds: float = 0.0) -> None:
        """Note that the result of the oldest step has arrived. seconds: duration of its
        computation, 0 if unknown."""
        self._applied.append((self._in_flight.popleft(), seconds))

    @property
    def oldest(self) -> DecodeStep | None:
        """The step whose result comes next, None if it was not recorded."""
        return self._in_flight[0] if self._in_flight else None

    def idle(self) -> None:
        """No step follows at once, so the time to the next plan is not that of a step."""
        self._last_plan = None

    def lost(self) -> None:
        """The results of the steps in flight were lost."""
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
        """Estimated seconds of a step of this many tokens, or a multiple of them if none was
        measured."""
        size = self._size(num_tokens)
        known = self._times.get((size, is_drafted))
        if known is None:
            return self._scaled(size, is_drafted)
        if known.count >= SURE and not self._is_stale(known):
            return known.seconds
        return min(known.seconds, self._scaled(size, is_drafted))

    def drafted(self, num_tokens: int, count: int) -> list[float]:
        """Seconds of steps with drafts of num_tokens + 1, num_tokens + 2, … tokens: `count`
        values."""
        sizes = [self._size(num_tokens + 1 + i) for i in range(count)]
        by_size = {size: self.expected(size, True) for size in set(sizes)}
        return [by_size[size] for size in sizes]

    def knows(self, num_tokens: int) -> bool:
        """Return True if steps of this many tokens without drafts were measured recently."""
        known = self._times.get((self._size(num_tokens), False))
        return known is not None and known.count >= SURE and not self._is_stale(known)

    def _scaled(self, size: int, is_drafted: bool) -> float:
        """Estimate it from the closest recent measurements."""
        times = {key: each for key, each in self._times.items() if key != (size, is_drafted)}
        fresh = [key for key, each in times.items() if not self._is_stale(each)]
        keys = fresh or list(times)
        if not keys:
            only = self._times.get((size, is_drafted))
            return _shape(size, is_drafted) if only is None else only.seconds
        near = min(keys, key=lambda key: (key[1] != is_drafted, abs(key[0] - size)))
        return times[near].seconds * _shape(size, is_drafted) / _shape(*near)
