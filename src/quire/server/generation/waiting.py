"""Admission to the engine's queue. The server sheds load here and nowhere else."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from math import ceil
from typing import Any, TypeVar

from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits

__all__ = ["Party", "Place", "WaitingRoom", "within"]

T = TypeVar("T")

MAX_RETRY_AFTER_S = 30.0

PATIENT_S = 30 * 86_400.0
"""Longest wait for spare capacity."""


class Party:
    """The prompts of one HTTP request, which are admitted together. num_together: most prompts that
    wait at once. is_in: one prompt was admitted; the others follow. is_spare: the prompts run on
    capacity that others leave, and wait for it."""

    __slots__ = ("is_in", "is_spare", "num_requests", "num_together", "num_tokens")

    def __init__(self, num_together: int = 1, *, is_spare: bool = False) -> None:
        self.is_in = False
        self.is_spare = is_spare
        self.num_together = num_together
        self.num_requests = 0
        self.num_tokens = 0


class Place:
    """One prompt's place in the waiting room. `leave` gives it up, once."""

    __slots__ = ("_is_started", "_num_ahead", "_num_tokens", "_party", "_room", "_silent_before_s")

    def __init__(self, room: WaitingRoom, party: Party) -> None:
        self._room: WaitingRoom | None = room
        self._party = party
        self._num_tokens = 0
        self._num_ahead = 0
        self._is_started = False
        self._silent_before_s = room.silent_s

    def hold(self, num_tokens: int) -> None:
        """Set the prompt's number of tokens once it is known. Raises RefusedError 503 if too many
        wait."""
        if self._room is not None:
            num_ahead = self._room.num_tokens + self._room.num_computing
            self._room.add_tokens(num_tokens, self._party)
            self._num_tokens, self._num_ahead = num_tokens, num_ahead

    def queue_s(self) -> float:
        """Seconds that this prompt may wait for its first step, at the measured speed. Those in
        which no engine answers do not count."""
        room = self._room
        return 0.0 if room is None else room.queue_s(self._num_ahead) + self._silent_s(room)

    def first_token_s(self) -> float:
        """Seconds from arrival within which its first token must come, likewise."""
        room = self._room
        if room is None:
            return 0.0
        return room.first_token_s(self._num_ahead + self._num_tokens) + self._silent_s(room)

    def _silent_s(self, room: WaitingRoom) -> float:
        return room.silent_s - self._silent_before_s

    def total_s(self, limit_s: float) -> float:
        """Return the seconds from arrival within which its last token must come. limit_s: limit of
        the server."""
        return limit_s

    def start(self) -> None:
        """Note that the first step was planned. The request no longer waits, and others wait for it
        until `leave`."""
        if self._room is not None and not self._is_started:
            self._is_started = True
            self._room.release(self._num_tokens, self._party)
            self._room.num_computing += self._num_tokens

    def leave(self) -> None:
        """Note the first token, or the end of the request. May be called twice."""
        room, self._room = self._room, None
        if room is None:
            return
        if self._is_started:
            room.num_computing -= self._num_tokens
        else:
            room.release(self._num_tokens, self._party)


class _SparePlace(Place):
    """Place of a prompt that displaces no other one, and for whose answer no client waits."""

    __slots__ = ()

    def hold(self, num_tokens: int) -> None:
        """Others are counted without it."""

    def queue_s(self) -> float:
        return PATIENT_S

    def first_token_s(self) -> float:
        return PATIENT_S

    def total_s(self, limit_s: float) -> float:
        return max(limit_s, PATIENT_S)

    def start(self) -> None:
        """Others are counted without it."""

    def leave(self) -> None:
        """Others are counted without it."""


class WaitingRoom:
    """Counts the requests between their arrival and their first step. The bound on waiting tokens
    follows the measured rate of prefill (`observe`), so that no request is admitted that would wait
    far longer than `max_queue_s`."""

    def __init__(
        self,
        limits: Limits,
        *,
        num_fronts: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_fronts: processes that share the bounds equally."""
        self._limits = limits
        self._num_fronts = num_fronts
        self._clock = clock
        self._num_requests = 0
        self._num_tokens = 0
        self._rate = 0.0
        self._speed = 0.0
        self.num_computing = 0
        """Prompt tokens of requests between their first step and their first token."""
        self._last: tuple[float, int] | None = None
        self._silence_s, self._silent_since = 0.0, math.inf
        self._max_model_len = 1
        self._max_num_seqs = 1
        self.refused: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Measured prompt tokens per second while requests waited; 0 before the first reading."""
        return self._rate

    def set_capacity(self, max_model_len: int, max_num_seqs: int) -> None:
        """Set the engine's capacity, from which the defaults of the bounds follow."""
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs

    def observe(self, prompt_tokens_total: int) -> None:
        """Take a reading of the engine's counter, about once a second."""
        now = self._clock()
        if self._last is not None and self._num_requests and now > self._last[0]:
            rate = max(0, prompt_tokens_total - self._last[1]) / (now - self._last[0])
            self._rate = rate if self._rate == 0.0 else 0.8 * self._rate + 0.2 * rate
        self._last = (now, prompt_tokens_total)

    def observe_speed(self, prefill_tokens_per_s: float) -> None:
        """Set the speed that the engine measured itself; 0.0 before there is one."""
        self._speed = prefill_tokens_per_s

    def note_silence(self, *, is_silent: bool) -> None:
        """Note whether no engine answers, about once a second."""
        self._silence_s = self.silent_s
        self._silent_since = self._clock() if is_silent else math.inf

    @property
    def silent_s(self) -> float:
        """Seconds in which no engine has answered so far."""
        return self._silence_s + max(self._clock() - self._silent_since, 0.0)

    def queue_s(self, num_ahead: int) -> float:
        """Longest wait behind prompts of this many tokens."""
        return self._limits.queue_s(num_ahead, self._speed)

    def first_token_s(self, num_tokens: int) -> float:
        """Longest time to the first token of the last of prompts with this many tokens."""
        return self._limits.first_token_s(num_tokens, self._speed)

    def check(self) -> None:
        """Raise RefusedError 503 if as many requests wait as may. This is cheap, before a body is
        read."""
        self._check_room(1)

    def enter(self, party: Party) -> Place:
        """Take a place for a prompt. Raises RefusedError 503 if there is no room for the prompts of
        its party that wait at once. A party is admitted as a whole, and always while nothing else
        waits; otherwise one above the bound could never be served."""
        if party.is_spare:
            return _SparePlace(self, party)
        if not party.is_in:
            self._check_room(party.num_together)
        party.is_in = True
        self._num_requests += 1
        party.num_requests += 1
        return Place(self, party)

    def add_tokens(self, num_tokens: int, party: Party) -> None:
        """Count more tokens of a party. A party alone always fits: the engine decides whether it
        can be served. Raises RefusedError 503 if they do not fit."""
        all_fronts = self._limits.queue_tokens(self._max_model_len, self._rate)
        highest = ceil(all_fronts / self._num_fronts)
        of_others = self._num_tokens - party.num_tokens
        is_alone = self._num_requests == party.num_requests
        if not is_alone and of_others + num_tokens > highest:
            raise self._full("tokens", highest, "max_queue_tokens")
        self._num_tokens += num_tokens
        party.num_tokens += num_tokens

    def release(self, num_tokens: int, party: Party) -> None:
        """Used by `Place` only."""
        self._num_requests -= 1
        self._num_tokens -= num_tokens
        party.num_requests -= 1
        party.num_tokens -= num_tokens

    @property
    def retry_after_s(self) -> float:
        """Estimate the seconds until half of the waiting work is done."""
        if self._rate <= 0.0:
            return 1.0
        return min(MAX_RETRY_AFTER_S, max(1.0, 0.5 * self._num_tokens / self._rate))

    def _check_room(self, num_more: int) -> None:
        highest = ceil(self._limits.queue_requests(self._max_num_seqs) / self._num_fronts)
        num_waiting = self._num_requests
        if num_waiting >= highest or (num_waiting and num_waiting + num_more > highest):
            raise self._full("requests", highest, "max_queue_requests")

    def _full(self, what: str, highest: int, limit: str) -> RefusedError:
        self.refused[what] += 1
        return RefusedError(
            f"The server is overloaded: no more than {highest} {what} may wait ({limit}). Try "
            "again later.",
            status=503,
            retry_after_s=self.retry_after_s,
        )


async def within(limit_s: Callable[[], float], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work. Raises TimeoutError after `limit_s()` seconds; the value may rise
    meanwhile."""
    task = asyncio.ensure_future(work)
    begun = time.monotonic()
    try:
        while (left := begun + limit_s() - time.monotonic()) > 0.0:
            if (await asyncio.wait({task}, timeout=left))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
