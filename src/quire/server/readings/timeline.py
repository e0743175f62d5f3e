"""Timeline of a request."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from quire.server.readings.chat_parts import ChatParts

__all__ = ["Timeline", "TimelineLog"]

MAX_CHUNKS = 512
"""Chunks whose times are kept per request; later ones are only counted."""


@dataclass(slots=True)
class Timeline:
    """Times in seconds since arrival; None for events that have not happened.

    rendered: the prompt was tokenized. queued: it was sent to the engine. scheduled: its first step
    was planned. first_token, finished: the answer began and ended. chunk_times, chunk_sizes: times
    at which the engine gave tokens, and their numbers. num_chunk_tokens: tokens of all chunks so
    far. A request of several prompts has the times of the first prompt to get there, and chunks of
    all. tenant: name of the caller's key (see `Gate`); not shown. number: place in a `TimelineLog`,
    from 1. answer_id: id of the answer; not shown. parts: digests of the parts of its prompt; not
    shown. read_s: seconds in which its tokens became text, and were parsed if is_parsed; not shown.

    num_history_tokens: tokens of the conversation that the request continues. num_kept_tokens:
    number of the first ones that the prompt has unchanged; the rest was tokenized again.
    num_dropped_turns: number of turns that had no room. dropped_keywords: paths in the request's
    schemas that are not enforced. removed_lines: lines removed from the system prompt. ignored:
    fields and tools that had no effect. Each is shown if it is not empty.
    """

    request_id: str
    route: str
    tenant: str = ""
    answer_id: str = ""
    number: int = 0
    clock: Callable[[], float] = time.monotonic
    arrived_at: float = field(default_factory=time.time)
    rendered_s: float | None = None
    queued_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    dropped_keywords: list[str] = field(default_factory=list[str])
    num_dropped_turns: int = 0
    num_history_tokens: int = 0
    num_kept_tokens: int = 0
    removed_lines: list[str] = field(default_factory=list[str])
    ignored: list[str] = field(default_factory=list[str])
    parts: ChatParts | None = None
    read_s: float = 0.0
    is_parsed: bool = False
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    chunk_sizes: array[int] = field(default_factory=lambda: array("L"))
    _start: float = 0.0

    def __post_init__(self) -> None:
        self._start = self.clock()

    def is_named(self, name: str) -> bool:
        """Return whether this is the id of the request or of its answer."""
        return name in (self.request_id, self.answer_id)

    def now(self) -> float:
        """Seconds since arrival."""
        return self.clock() - self._start

    def add_chunk(self, num_tokens: int) -> float:
        """Note tokens from the engine, at this moment."""
        now = self.clock() - self._start
        if self.first_token_s is None:
            self.first_token_s = now
        self.num_chunks += 1
        self.num_chunk_tokens += num_tokens
        if self.num_chunks <= MAX_CHUNKS:
            self.chunk_times.append(now)
            self.chunk_sizes.append(num_tokens)
        return now

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON, with times in milliseconds since arrival."""
        times = ("rendered", "queued", "scheduled", "first_token", "finished")
        found: dict[str, object] = {
            "request_id": self.request_id,
            "route": self.route,
            "arrived_at": round(self.arrived_at, 6),
        }
        for name in times:
            value: float | None = getattr(self, f"{name}_s")
            found[f"{name}_ms"] = None if value is None else round(1000 * value, 3)
        found.update(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_accepted_prediction_tokens=self.num_accepted_prediction_tokens,
            num_rejected_prediction_tokens=self.num_rejected_prediction_tokens,
            finish_reason=self.finish_reason,
            error=self.error,
            num_chunks=self.num_chunks,
            chunks=[
                [round(1000 * when, 3), num]
                for when, num in zip(self.chunk_times, self.chunk_sizes, strict=True)
            ],
        )
        if self.num_history_tokens:
            found["num_history_tokens"] = self.num_history_tokens
            found["num_kept_tokens"] = self.num_kept_tokens
        for name in ("num_dropped_turns", "dropped_keywords", "removed_lines", "ignored"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        return found


class TimelineLog:
    """The timelines of open requests, and of the last ones that ended."""

    def __init__(self, num_kept: int) -> None:
        self._kept: deque[Timeline] = deque(maxlen=num_kept)
        self._open: dict[int, Timeline] = {}
        self._num_begun = 0

    def begin(self, timeline: Timeline) -> None:
        """Number a request, and show it until it ends."""
        self._num_begun += 1
        timeline.number = self._num_begun
        self._open[timeline.number] = timeline

    def end(self, timeline: Timeline) -> None:
        """Keep the timeline of a request that has begun."""
        del self._open[timeline.number]
        self._kept.append(timeline)

    def open(self, tenant: str | None) -> list[Timeline]:
        """Return the timelines of open requests of one tenant, oldest first; None for all."""
        return [each for each in self._open.values() if tenant in (None, each.tenant)]

    def latest(self, tenant: str | None) -> Iterator[Timeline]:
        """Yield the timelines of one tenant, newest first; None for all."""
        return (kept for kept in reversed(self._kept) if tenant in (None, kept.tenant))

    def find(self, request_id: str, tenant: str) -> Timeline | None:
        """Return the newest of that id and tenant."""
        return next((kept for kept in self.latest(tenant) if kept.request_id == request_id), None)

    def named(self, name: str, tenant: str) -> Timeline | None:
        """Return the newest of a tenant whose request or answer has this id, open or not."""
        known = chain(reversed(self.open(tenant)), self.latest(tenant))
        return next((each for each in known if each.is_named(name)), None)
