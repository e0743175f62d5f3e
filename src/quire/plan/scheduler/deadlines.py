"""Finds the requests whose first token can no longer come in time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from quire.plan.scheduler.sequence import GroupState, SequenceGroup

__all__ = ["Deadlines", "PrefillSpeed"]

DECAY = 0.9
"""Weight of the older measurements at each step that computes prompts: about ten steps count."""

KNOWN_FOR_S = 10.0
"""Age in seconds from which a measured speed drops no request: the next admission measures it
again."""

COMPACT_AT = 64
"""Number of groups in the heap from which on those that need no watching any more are removed."""


class PrefillSpeed:
    """Speed of prefill in prompt tokens per second, over the last steps that computed prompts. Time
    that such a step spent on other rows counts too. Steps end in the order of their plans."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, int]] = deque()
        self._tokens = 0.0
        self._seconds = 0.0
        self._measured_at = 0.0

    @property
    def last_known(self) -> float:
        """0.0 as long as nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def tokens_per_s(self, now: float) -> float:
        """0.0 if nothing was measured of late."""
        return self.last_known if now - self._measured_at <= KNOWN_FOR_S else 0.0

    def step_planned(self, now: float, num_prompt_tokens: int) -> None:
        self._in_flight.append((now, num_prompt_tokens))

    def step_ended(self, seconds: float) -> None:
        """Record the duration of the oldest step; 0.0 if it is not known."""
        planned_at, num_tokens = self._in_flight.popleft()
        if num_tokens and seconds:
            self._tokens = DECAY * self._tokens + num_tokens
            self._seconds = DECAY * self._seconds + seconds
            self._measured_at = planned_at

    def steps_lost(self) -> None:
        self._in_flight.clear()


class Deadlines:
    """Waiting groups with a deadline, sorted by the time at which their prefill must begin, at the
    speed measured on their arrival. At that time each is checked again."""

    def __init__(self, num_uncached: Callable[[SequenceGroup], int]) -> None:
        self._num_uncached = num_uncached
        self._latest_starts: list[tuple[float, int, SequenceGroup]] = []
        self._compact_at = COMPACT_AT

    def watch(self, group: SequenceGroup, speed: float) -> None:
        """A new group, if it has a deadline and no token yet; looked at when its prompt must begin
        at `speed`."""
        if _has_deadline(group):
            num_tokens = len(group.request.prompt_token_ids)
            self._push(group, self._latest_start(group, num_tokens, speed))

    def pop_late(self, now: float, speed: float) -> list[SequenceGroup]:
        """Return the groups, never admitted, that would miss their deadline if they were admitted
        now and computed `speed` tokens per second. With 0.0: the groups that have missed it."""
        late: list[SequenceGroup] = []
        while self._latest_starts and self._latest_starts[0][0] < now:
            group = heapq.heappop(self._latest_starts)[2]
            if _needs_no_watch(group):
                continue
            latest = self._latest_start(group, self._num_uncached(group), speed)
            if latest < now:
                late.append(group)
            else:
                self._push(group, max(latest, now))
        return late

    def is_late(self, group: SequenceGroup, now: float, speed: float) -> bool:
        """Return whether a group that was never admitted would miss its deadline, admitted now."""
        if group.was_admitted or not _has_deadline(group):
            return False
        return self._latest_start(group, self._num_uncached(group), speed) < now

    def _push(self, group: SequenceGroup, latest_start: float) -> None:
        heapq.heappush(self._latest_starts, (latest_start, group.number, group))
        if len(self._latest_starts) >= self._compact_at:
            kept = [entry for entry in self._latest_starts if not _needs_no_watch(entry[2])]
            heapq.heapify(kept)
            self._latest_starts = kept
            self._compact_at = max(2 * len(kept), COMPACT_AT)

    def _latest_start(self, group: SequenceGroup, num_tokens: int, speed: float) -> float:
        request = group.request
        seconds = num_tokens / speed if speed else 0.0
        return request.arrival_time + (request.scheduling.deadline_s or 0.0) - seconds


def _needs_no_watch(group: SequenceGroup) -> bool:
    return group.was_admitted or group.state is GroupState.FINISHED


def _has_deadline(group: SequenceGroup) -> bool:
    """Return whether the request has had its first token, as a resumed one has."""
    request = group.request
    return request.scheduling.deadline_s is not None and not len(request.output_token_ids)
