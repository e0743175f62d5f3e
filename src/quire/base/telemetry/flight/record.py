"""The ring of an engine core's last steps and events, with a fixed layout.

Its memory may be a file that outlives the core. Whoever watches the core then reads what it did
before it hung or died, without asking it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Annotated, Any, NamedTuple, get_type_hints

from quire.base.errors import ConfigError

__all__ = [
    "EVENT_BYTES", "FACTS_BYTES", "HEADER_BYTES", "LOST", "NUM_HANDLES", "RING_PREFIX",
    "STEP_BYTES", "Doing", "EndedPart", "EventKind", "FlightEvent", "FlightRecord",
    "FlightRecorder", "FlightStep", "GivenPart", "PlannedPart", "read_record", "ring_in",
]  # fmt: skip

RING_PREFIX = "flight-"
"""Start of the names of files that have rings; the number of the core follows."""

MAGIC, VERSION = b"QUIRERNG", 1
HEADER_BYTES, FACTS_BYTES = 4096, 16 * 1024
STEP_BYTES, NUM_STEPS = 320, 2048
EVENT_BYTES, NUM_EVENTS = 96, 2048
NUM_HANDLES = 8
"""Sequences that a step names, those within their prompts first."""

IN_FLIGHT, HAS_RESULT, LOST = 0, 1, 2
"""Values of `EndedPart.status`: the step is in flight, has a result, or will never have one."""

Long = Annotated[int, "q"]
Word = Annotated[int, "I"]


class Doing(IntEnum):
    """Work of the thread that runs steps."""

    STARTING = 0
    IDLE = 1
    BETWEEN_STEPS = 2
    PLANNING = 3
    GIVING = 4
    AWAITING_DRAFTS = 5
    AWAITING_RESULT = 6
    APPLYING = 7
    AWAITING_OPENINGS = 8
    AWAITING_HOOKS = 9
    IN_CONTROL = 10

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Doing.STARTING: "starting",
    Doing.IDLE: "idle: waiting for messages",
    Doing.BETWEEN_STEPS: "between steps: messages, outputs, metrics",
    Doing.PLANNING: "planning a step",
    Doing.GIVING: "giving a step to the executor",
    Doing.AWAITING_DRAFTS: "waiting for a model's drafts of step",
    Doing.AWAITING_RESULT: "waiting for the result of step",
    Doing.APPLYING: "applying the result of a step",
    Doing.AWAITING_OPENINGS: "waiting for grammars, adapters or the disk",
    Doing.AWAITING_HOOKS: "waiting for output hooks",
    Doing.IN_CONTROL: "carrying out an operation",
}


class EventKind(IntEnum):
    """Kinds of events. Each line says what an event's `value` and `text` are."""

    ADDED = 1
    """Tokens of the prompt; the request's id."""
    BLOCKED = 2
    """The ticket; what the request waits for."""
    UNBLOCKED = 3
    """The ticket."""
    ADMITTED = 4
    """Tokens found in the cache."""
    PREEMPTED = 5
    """Tokens that had been computed; how they come back."""
    ENDED = 6
    """Nothing; the reason."""
    FAULT = 7
    """The step; the error."""
    CONTROL = 8
    """Nothing; the operation."""


class PlannedPart(NamedTuple):
    """A step when it has been planned.

    number: from 1. begin: time of the plan in nanoseconds, of the clock that planned it. rows:
    sequences, prompt_rows of them within their prompts. decode, prefill: tokens behind prompts, and
    of prompts. drafts: drafts to verify. running, waiting, blocked: requests. free, cached, used:
    KV blocks. evicted: blocks taken from cached prefixes. tickets: pieces of work that requests
    wait for. in_flight: steps that had no result yet. preempted: requests since the last plan.
    reason: why no more requests were admitted, empty if none waited. handles: int64 of the first
    rows, those within their prompts first.
    """

    number: Long
    begin: Long
    rows: Word
    prompt_rows: Word
    decode: Word
    prefill: Word
    drafts: Word
    running: Word
    waiting: Word
    blocked: Word
    free: Word
    cached: Word
    used: Word
    evicted: Word
    tickets: Word
    in_flight: Word
    preempted: Word
    reason: Annotated[bytes, "96s"]
    handles: Annotated[bytes, f"{8 * NUM_HANDLES}s"]

    @property
    def why(self) -> str:
        return _text(self.reason)

    @property
    def first_handles(self) -> tuple[int, ...]:
        return Struct(f"<{NUM_HANDLES}q").unpack(self.handles)[: self.rows]


class GivenPart(NamedTuple):
    """plan_begin: when the plan began, on the clock of the ring, ns. plan_us, give_us: microseconds
    of the plan, and of handing it to the executor."""

    plan_begin: Long
    plan_us: Word
    give_us: Word


class EndedPart(NamedTuple):
    """A step when its result is there. wait_begin: when the core began to wait for it, ns. wait_us:
    time of that wait. compute_us: computing time, 0 if nobody measured it. tokens: sampled ones.
    accepted: drafts that were right. status: `IN_FLIGHT`, `HAS_RESULT` or `LOST`."""

    wait_begin: Long
    wait_us: Word
    compute_us: Word
    tokens: Word
    accepted: Word
    status: Word


class _EventPart(NamedTuple):
    at: Long
    handle: Long
    value: Long
    kind: Word
    text: Annotated[bytes, "68s"]


def _struct_of(part: type) -> Struct:
    hints = get_type_hints(part, include_extras=True)
    return Struct("<" + "".join(hint.__metadata__[0] for hint in hints.values()))


_PLANNED, _GIVEN, _ENDED = _struct_of(PlannedPart), _struct_of(GivenPart), _struct_of(EndedPart)
_EVENT, _LONG, _WORD = _struct_of(_EventPart), Struct("<q"), Struct("<I")
_GIVEN_AT = _PLANNED.size
_ENDED_AT = _GIVEN_AT + _GIVEN.size
_APPLY_AT = _ENDED_AT + _ENDED.size
_CHECK_AT = STEP_BYTES - _LONG.size
_SLOT = Struct(f"{_PLANNED.format}{_CHECK_AT - _GIVEN_AT}xq")
"""A planned step, zeros for what follows, and its number once more, which is written last: readers
find another number there until then."""

_MAX_WORD = 2**32 - 1

_HEADER = Struct("<8s6I4q")
"""Magic, version, sizes, time at the start on both clocks, process, replica."""
_LIVE_AT, _LIVE = 256, Struct("<qqqI")
"""Since when, for which step, number of steps so far, `Doing`."""
_EVENTS_AT = 296
"""Number of events so far."""


@dataclass(frozen=True, slots=True)
class FlightStep:
    """A step of the ring. apply_us: time that its result took to apply."""

    planned: PlannedPart
    given: GivenPart
    ended: EndedPart
    apply_us: int

    @property
    def has_result(self) -> bool:
        return self.ended.status == HAS_RESULT


@dataclass(frozen=True, slots=True)
class FlightEvent:
    """at: nanoseconds. value, text: see `EventKind`."""

    at: int
    kind: EventKind
    handle: int
    value: int
    text: str


class FlightRecorder:
    """Written by the thread that runs steps, within a few microseconds a step."""

    def __init__(
        self,
        memory: mmap.mmap | None = None,
        *,
        replica: int = 0,
        num_steps: int = NUM_STEPS,
        num_events: int = NUM_EVENTS,
        clock: Callable[[], int] = time.monotonic_ns,
        on_fault: Callable[[str], object] = lambda _: None,
    ) -> None:
        """memory: `num_bytes()` zeros; None for memory of this process alone. clock: time in
        nanoseconds, for events and waits. on_fault: told of faults, while the ring still shows what
        was in flight."""
        self._clock = clock
        self._on_fault = on_fault
        self._num_steps, self._num_events = num_steps, num_events
        self._events_at = HEADER_BYTES + FACTS_BYTES + num_steps * STEP_BYTES
        size = num_bytes(num_steps, num_events)
        self._memory = mmap.mmap(-1, size) if memory is None else memory
        self._seq = self._event_seq = 0
        self._open: deque[tuple[int, int]] = deque()  # places and numbers of the steps in flight
        self._last_at = 0
        self._wait_begin = self._wait_end = 0
        self._evicted_total = self._preempted_total = self._accepted_total = 0
        self._reason, self._reason_bytes = "", b""
        _HEADER.pack_into(
            self._memory, 0, MAGIC, VERSION, STEP_BYTES, num_steps, EVENT_BYTES, num_events,
            FACTS_BYTES, clock(), time.time_ns(), os.getpid(), replica,
        )  # fmt: skip
        self.enter(Doing.STARTING)

    # --- what the core does ---------------------------------------------------------------------

    def note_facts(self, facts: Mapping[str, str]) -> None:
        """Keep what holds for all steps: decisions with their reasons. What has no room is left
        out, the longest first."""
        kept = dict(facts)
        while len(data := json.dumps(kept).encode()) > FACTS_BYTES - 4:
            del kept[max(kept, key=lambda name: len(kept[name]))]
        self._memory[HEADER_BYTES : HEADER_BYTES + 4 + len(data)] = _WORD.pack(len(data)) + data

    def enter(self, doing: Doing) -> int:
        """Note what the core does from now on. Return the time."""
        now = self._clock()
        step = self._open[0][1] if self._open else 0
        _LIVE.pack_into(self._memory, _LIVE_AT, now, step, self._seq, doing)
        return now

    def event(self, kind: EventKind, handle: int, value: int = 0, text: str = "") -> None:
        """Note an event of a request, by its first handle; -1 for none."""
        at = self._events_at + self._event_seq % self._num_events * EVENT_BYTES
        _EVENT.pack_into(self._memory, at, self._clock(), handle, value, kind, _cut(text, 68))
        self._event_seq += 1
        _LONG.pack_into(self._memory, _EVENTS_AT, self._event_seq)

    def fault(self, reason: str) -> None:
        """Note a fault, and tell whoever writes dumps. Another thread may call it."""
        (step,) = _LONG.unpack_from(self._memory, _LIVE_AT + _LONG.size)
        self.event(EventKind.FAULT, -1, step, reason)
        self._on_fault(f"fault: {reason}")

    # --- steps ----------------------------------------------------------------------------------

    def reason_of(self, text: str) -> bytes:
        """Return a reason for `PlannedPart`. The last one is remembered."""
        if text is not self._reason:
            self._reason, self._reason_bytes = text, _cut(text, 96)
        return self._reason_bytes

    def since_last(self, evicted_total: int, preempted_total: int) -> tuple[int, int]:
        """Return how far two counts have come since the last call."""
        evicted = evicted_total - self._evicted_total
        preempted = preempted_total - self._preempted_total
        self._evicted_total, self._preempted_total = evicted_total, preempted_total
        return evicted, preempted

    def planned(self, step: tuple[Any, ...]) -> None:
        """Note a step that was planned: a `PlannedPart`, or its values. It counts when `enter` is
        called next."""
        at = HEADER_BYTES + FACTS_BYTES + self._seq % self._num_steps * STEP_BYTES
        number = step[0]
        _SLOT.pack_into(self._memory, at, *step, number)
        self._seq += 1
        self._open.append((at, number))
        self._last_at = at

    def given(self, begin: int, planned: int) -> None:
        """The last planned step has been given to the executor. begin, planned: times at which its
        plan began and ended."""
        give_us = (self._clock() - planned) // 1000
        plan_us = (planned - begin) // 1000
        at = self._last_at + _GIVEN_AT
        _GIVEN.pack_into(self._memory, at, begin, plan_us & _MAX_WORD, give_us & _MAX_WORD)

    def waited(self, begin: int) -> None:
        """The wait for the oldest step in flight is over; its result is applied from now on."""
        self._wait_begin, self._wait_end = begin, self.enter(Doing.APPLYING)

    def ended(self, seconds: float, tokens: int, accepted_total: int) -> None:
        """Note the result of the oldest step in flight. seconds: computing time. accepted_total:
        drafts that were accepted so far, of all steps."""
        accepted = accepted_total - self._accepted_total
        self._accepted_total = accepted_total
        if not self._open:
            return
        self._last_at = at = self._open.popleft()[0]
        _ENDED.pack_into(
            self._memory,
            at + _ENDED_AT,
            self._wait_begin,
            (self._wait_end - self._wait_begin) // 1000 & _MAX_WORD,
            int(seconds * 1e6) & _MAX_WORD,
            tokens,
            accepted,
            HAS_RESULT,
        )

    def applied(self) -> None:
        """The result that ended last has been applied."""
        apply_us = (self.enter(Doing.BETWEEN_STEPS) - self._wait_end) // 1000
        _WORD.pack_into(self._memory, self._last_at + _APPLY_AT, apply_us & _MAX_WORD)

    def lost(self) -> None:
        """The steps in flight give no result."""
        while self._open:
            part = EndedPart(self._wait_begin, 0, 0, 0, 0, LOST)
            _ENDED.pack_into(self._memory, self._open.popleft()[0] + _ENDED_AT, *part)

    def recent(self, begin: int, most: int) -> list[FlightStep]:
        """Return the last steps that were planned at `begin` or later, oldest first, at most `most`
        of them."""
        found: list[FlightStep] = []
        for seq in range(self._seq - 1, max(self._seq - min(most, self._num_steps), 0) - 1, -1):
            at = HEADER_BYTES + FACTS_BYTES + seq % self._num_steps * STEP_BYTES
            step = _step_at(self._memory, at)
            if step.planned.begin < begin:
                break
            found.append(step)
        return found[::-1]

    # --- for dumps ------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return a copy of the memory, for `read_record`."""
        return self._memory[:]


def num_bytes(num_steps: int = NUM_STEPS, num_events: int = NUM_EVENTS) -> int:
    """Return the size of a ring's memory."""
    return HEADER_BYTES + FACTS_BYTES + num_steps * STEP_BYTES + num_events * EVENT_BYTES


def ring_path(directory: Path, instance: int) -> Path:
    """Return the file of a core's ring."""
    return directory / f"{RING_PREFIX}{instance}"


def ring_in(directory: Path, instance: int) -> mmap.mmap:
    """Return the memory of a new ring in a file of this directory. Only pages that are written take
    memory."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    descriptor = os.open(ring_path(directory, instance), flags, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes())
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """Contents of a ring. mono_ns, wall_ns: one moment on the clock of the ring, and in nanoseconds
    since 1970. doing, since, step: work of the core when it was read, its begin, and its step.
    steps, events: oldest first. num_steps: steps since the start."""

    pid: int
    replica: int
    mono_ns: int
    wall_ns: int
    doing: Doing
    since: int
    step: int
    num_steps: int
    facts: Mapping[str, str]
    steps: tuple[FlightStep, ...]
    events: tuple[FlightEvent, ...]


def read_record(data: bytes) -> FlightRecord:
    """Read the copy of a ring. A slot that was being written is left out. Raises ConfigError for
    bytes that are none, and for another version."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise ConfigError("this is no ring of a flight recorder")
    header = _HEADER.unpack_from(data)
    _, version, step_bytes, num_steps, event_bytes, num_events, facts_bytes = header[:7]
    sizes = step_bytes, event_bytes, facts_bytes
    if version != VERSION or sizes != (STEP_BYTES, EVENT_BYTES, FACTS_BYTES):
        raise ConfigError(
            f"the ring has version {version} and this program reads {VERSION}: use the quire that "
            "wrote it"
        )
    if len(data) != num_bytes(num_steps, num_events):
        raise ConfigError(
            f"the ring has {len(data):,} of {num_bytes(num_steps, num_events):,} bytes: it was cut "
            "off"
        )
    since, step, count, doing = _LIVE.unpack_from(data, _LIVE_AT)
    (event_count,) = _LONG.unpack_from(data, _EVENTS_AT)
    mono_ns, wall_ns, pid, replica = header[7:]
    events_at = HEADER_BYTES + FACTS_BYTES + num_steps * STEP_BYTES
    return FlightRecord(
        pid=pid,
        replica=replica,
        mono_ns=mono_ns,
        wall_ns=wall_ns,
        doing=Doing(doing),
        since=since,
        step=step,
        num_steps=count,
        facts=_facts_of(data),
        steps=tuple(_steps_of(data, count, num_steps)),
        events=tuple(_events_of(data, event_count, num_events, events_at)),
    )


def _facts_of(data: bytes) -> dict[str, str]:
    (length,) = _WORD.unpack_from(data, HEADER_BYTES)
    return json.loads(data[HEADER_BYTES + 4 : HEADER_BYTES + 4 + length]) if length else {}


def _steps_of(data: bytes, count: int, num_steps: int) -> Iterator[FlightStep]:
    for seq in range(max(count - num_steps, 0), count):
        at = HEADER_BYTES + FACTS_BYTES + seq % num_steps * STEP_BYTES
        step = _step_at(data, at)
        if _LONG.unpack_from(data, at + _CHECK_AT) == (step.planned.number,):
            yield step


def _step_at(data: bytes | mmap.mmap, at: int) -> FlightStep:
    return FlightStep(
        PlannedPart(*_PLANNED.unpack_from(data, at)),
        GivenPart(*_GIVEN.unpack_from(data, at + _GIVEN_AT)),
        EndedPart(*_ENDED.unpack_from(data, at + _ENDED_AT)),
        _WORD.unpack_from(data, at + _APPLY_AT)[0],
    )


def _events_of(data: bytes, count: int, num_events: int, start: int) -> Iterator[FlightEvent]:
    for seq in range(max(count - num_events, 0), count):
        part = _EventPart(*_EVENT.unpack_from(data, start + seq % num_events * EVENT_BYTES))
        if part.kind:  # 0: it was being written
            kind = EventKind(part.kind)
            yield FlightEvent(part.at, kind, part.handle, part.value, _text(part.text))


def _cut(text: str, size: int) -> bytes:
    """Return the first bytes of a text. What UTF-8 lacks, as a file's name may have it, is "?"."""
    return text[:size].encode(errors="replace")[:size]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
