"""Finds the requests whose first token can no longer come in time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from quire.scheduler.sequence import GroupState, SequenceGroup

__all__ = ["Deadlines", "PrefillSpeed"]

DECAY = 0.9
"""Weight of what was measured before, with each step that computed prompts: about ten count."""


class PrefillSpeed:
    """Prompt tokens per second, over the last steps that computed any; what such steps computed
    for others is part of their time. Steps end in the order in which they were planned, one after
    the other; the end of one is seen by the next plan."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, int]] = deque()
        self._num_ended = 0
        self._last_end = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0.0 as long as nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def step_planned(self, now: float, num_prompt_tokens: int) -> None:
        self._in_flight.append((now, num_prompt_tokens))

    def step_ended(self) -> None:
        """The oldest step; at a time that `tick` tells."""
        self._num_ended += 1

    def tick(self, now: float) -> None:
        """Time is `now`: the steps that have ended since the last call have just ended."""
        for _ in range(self._num_ended):
            planned_at, num_tokens = self._in_flight.popleft()
            seconds = now - max(planned_at, self._last_end)
            self._last_end = now
            if num_tokens:
                self._tokens = DECAY * self._tokens + num_tokens
                self._seconds = DECAY * self._seconds + seconds
        self._num_ended = 0

    def steps_lost(self) -> None:
        self._in_flight.clear()
        self._num_ended = 0


class Deadlines:
    """The waiting groups that have a deadline, by the time at which their prefill must begin at
    the speed that was measured when they came. Then each is looked at again."""

    def __init__(self, speed: PrefillSpeed, num_uncached: Callable[[SequenceGroup], int]) -> None:
        self._speed = speed
        self._num_uncached = num_uncached
        self._latest_starts: list[tuple[float, int, SequenceGroup]] = []

    def watch(self, group: SequenceGroup) -> None:
        """A new group, if it has a deadline and no token yet."""
        if _has_deadline(group):
            num_tokens = len(group.request.prompt_token_ids)
            self._push(group, self._latest_start(group, num_tokens))

    def pop_late(self, now: float) -> list[SequenceGroup]:
        """Groups, never admitted, that would miss their deadline if they were admitted now."""
        late: list[SequenceGroup] = []
        while self._latest_starts and self._latest_starts[0][0] < now:
            group = heapq.heappop(self._latest_starts)[2]
            if group.was_admitted or group.state is not GroupState.WAITING:
                continue
            latest = self._latest_start(group, self._num_uncached(group))
            if latest < now:
                late.append(group)
            else:
                self._push(group, latest)
        return late

    def is_late(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group that was never admitted would miss its deadline, admitted now."""
        if group.was_admitted or not _has_deadline(group):
            return False
        return self._latest_start(group, self._num_uncached(group)) < now

    def _push(self, group: SequenceGroup, latest_start: float) -> None:
        heapq.heappush(self._latest_starts, (latest_start, group.number, group))

    def _latest_start(self, group: SequenceGroup, num_tokens: int) -> float:
        request, speed = group.request, self._speed.tokens_per_s
        seconds = num_tokens / speed if speed else 0.0
        return request.arrival_time + (request.scheduling.deadline_s or 0.0) - seconds


def _has_deadline(group: SequenceGroup) -> bool:
    """A request that resumes has had its first token."""
    request = group.request
    return request.scheduling.deadline_s is not None and not len(request.output_token_ids)
