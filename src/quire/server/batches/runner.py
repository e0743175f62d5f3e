"""Answers a file of requests into a file of answers in the same order.

Answers first go to a temporary file as they arrive, each with the key of its line, so that a killed
run can continue. At the end they are put in order into the target. The temporary file stays if the
server failed at a line; a later run asks such lines again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, ParamSpec, TypeVar

import msgspec
from starlette.types import ASGIApp

from quire.base.errors import ConfigError, EngineError, QuireError
from quire.protocol.status import EngineState
from quire.server.batches.caller import Called, call
from quire.server.batches.lines import (
    BatchLine,
    error_line,
    read_line,
    result_line,
    texts_of_lines,
)
from quire.server.generation.backend import Backend, describe
from quire.server.http.gate import InternalCaller
from quire.server.requests.errors import OVERLOADED, error_reply

__all__ = [
    "BESIDE",
    "PARTIAL",
    "BatchCounts",
    "BatchFiles",
    "BatchRunner",
    "LineRules",
    "NoRoomError",
]

PARTIAL = ".partial"
BESIDE = (PARTIAL, PARTIAL + ".ordered")
"""Endings of the files that a run writes next to the target."""
GOOD = 200
FIRST_FAULT = 500
"""Statuses from here on are the server's fault, so a later run asks again."""
UNAVAILABLE = (503, OVERLOADED)
"""The engine was restarting or had no room, and nothing was computed: this run asks again."""
MAX_TRIES = 3
PAUSE_S = 1.0
LINES_TOGETHER = 64
"""Lines that a thread reads ahead before the event loop starts to answer them."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


class NoRoomError(QuireError):
    """The answers of a batch have reached their bound in bytes."""


@dataclass(slots=True)
class BatchCounts:
    """num_lines: read so far. num_kept: answered by an earlier run. num_done: finished. num_failed:
    finished without a good answer."""

    num_lines: int = 0
    num_kept: int = 0
    num_failed: int = 0
    num_done: int = field(default=0, compare=False)


class _Place(NamedTuple):
    """Place of an answer in the temporary file, in bytes."""

    start: int
    length: int
    status: int


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """source: file with a request in each line. target: file of the answers. has_room: returns True
    if this many bytes of answers may be kept. opener: argument of `open` for the files that are
    written."""

    source: Path
    target: Path
    has_room: Callable[[int], bool] | None = None
    opener: Callable[[str, int], int] | None = None


@dataclass(frozen=True, slots=True)
class LineRules:
    """Conditions of a good line. route: the route that all lines must name, if any."""

    max_bytes: int
    route: str | None = None


class BatchRunner:
    """Runs the lines of one file, a bounded number at a time."""

    def __init__(
        self,
        app: ASGIApp,
        backend: Backend,
        files: BatchFiles,
        rules: LineRules,
        *,
        max_together: int,
        caller: InternalCaller | None = None,
        max_tries: int = MAX_TRIES,
    ) -> None:
        """backend: backend of the app. caller: identity of the requests. max_tries: attempts at a
        line that finds no room. Raises ConfigError if a file cannot be read or written."""
        source, target = files.source, files.target
        if not source.is_file():
            raise ConfigError(f"{str(source)!r} is no file. Name one with a request in each line.")
        if not target.absolute().parent.is_dir():
            raise ConfigError(f"{str(target.absolute().parent)!r} is no folder. Make it.")
        self._app = app
        self._backend = backend
        self._source = source
        self._target = target
        self._aside = target.with_name(target.name + PARTIAL)
        self._max_together = max_together
        self._rules = rules
        self._caller = caller
        self._max_tries = max_tries
        self._has_room, self._opener = files.has_room, files.opener
        self.counts = BatchCounts()

    @property
    def num_lines(self) -> int:
        return sum(1 for _ in self._lines())

    async def run(self, on_line: Callable[[], None]) -> BatchCounts:
        """Answer all lines. on_line: called for each finished line; if it raises, the answers so
        far are kept for the next run. Raises EngineError if the engine ends for good, NoRoomError
        if the answers get too long."""
        places = await _beside(self._places_of_earlier_run)
        self.counts = counts = BatchCounts(num_kept=len(places))
        with open(self._aside, "ab", opener=self._opener) as aside:
            try:
                await self._answer(aside, places, counts, on_line)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
        await _beside(self._put_in_order, places)
        return counts

    async def _answer(
        self,
        aside: IO[bytes],
        places: dict[str, _Place],
        counts: BatchCounts,
        on_line: Callable[[], None],
    ) -> None:
        """Write the missing answers, and note their places."""
        room = asyncio.Semaphore(self._max_together)

        def done(line: BatchLine, answer: bytes, status: int) -> None:
            record = line.key.encode() + b" " + answer + b"\n"
            if self._has_room and not self._has_room(aside.tell() + len(record)):
                raise NoRoomError(
                    f"There is no room for more answers than {counts.num_done} "
                    "(max_kept_file_bytes). Delete files, and send the other lines again."
                )
            counts.num_failed += status != GOOD
            counts.num_done += 1
            places[line.key] = _Place(aside.tell() + len(line.key) + 1, len(answer), status)
            aside.write(record)
            aside.flush()
            on_line()

        async def one(line: BatchLine) -> None:
            try:
                found = await self._asked(line)
                answer = result_line(line, found.status, found.request_id, found.body)
                done(line, answer, found.status)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            async for line in self._lines_by_slices():
                counts.num_lines += 1
                kept = None if line.fault else places.get(line.key)
                if line.fault or kept is not None:
                    counts.num_failed += kept is None or kept.status != GOOD
                    counts.num_done += 1
                    on_line()
                    continue
                await room.acquire()
                group.create_task(one(line))

    async def _asked(self, line: BatchLine) -> Called:
        """Ask when the engine is ready, and again after it was not."""
        await self._until_ready()
        found = await self._called(line)
        for _ in range(self._max_tries - 1):
            if found.status not in UNAVAILABLE:
                break
            await asyncio.sleep(PAUSE_S)
            await self._until_ready()
            found = await self._called(line)
        return found

    async def _called(self, line: BatchLine) -> Called:
        """Return the route's answer, or an internal error for an unexpected exception."""
        try:
            return await call(self._app, line.url, line.body, self._caller)
        except Exception as error:  # noqa: BLE001 - it is logged
            reply = error_reply(error, {"path": line.url})
            return Called(reply.status, body=reply.body)

    async def _until_ready(self) -> None:
        """Wait while the engine restarts or stalls. Raises EngineError if it ends for good."""
        while (status := self._backend.status).state is not EngineState.READY:
            if status.state in (EngineState.DEAD, EngineState.DRAINING):
                raise EngineError(
                    f"The engine is {describe(status)}. Its log says why; the same command goes on "
                    "from the answers that are there."
                )
            await asyncio.sleep(PAUSE_S)

    def _lines(self) -> Iterator[BatchLine]:
        seen: set[str] = set()
        with self._source.open("rb") as file:
            for text in texts_of_lines(file):
                yield read_line(text, seen, self._rules.max_bytes, self._rules.route)

    async def _lines_by_slices(self) -> AsyncGenerator[BatchLine]:
        """Yield the lines. A thread reads them, since a continued batch may begin with any number
        of answered ones."""
        lines = self._lines()
        while found := await _beside(lambda: list(itertools.islice(lines, LINES_TOGETHER))):
            for line in found:
                yield line

    def _places_of_earlier_run(self) -> dict[str, _Place]:
        """Return the places of whole answers in the temporary file, by key. An incomplete last line
        is cut off; lines at which the server failed are asked again."""
        places: dict[str, _Place] = {}
        if not self._aside.exists():
            return places
        end = 0
        with self._aside.open("rb") as file:
            for record in file:
                key, _, answer = record.rstrip(b"\n").partition(b" ")
                if not record.endswith(b"\n"):
                    break
                status = _status(answer)
                if status < FIRST_FAULT:
                    place = _Place(end + len(key) + 1, len(answer), status)
                    places[key.decode("latin-1")] = place
                end += len(record)
        os.truncate(self._aside, end)
        return places

    async def write_what_is_there(self) -> None:
        """Write the existing answers to the target, in order, after a run that was ended for
        good."""
        await _beside(self._write_what_is_there)

    def _write_what_is_there(self) -> None:
        places = self._places_of_earlier_run()
        if not self._aside.exists():
            self._aside.touch()
        self._put_in_order(places, is_whole=False)

    def _put_in_order(self, places: dict[str, _Place], *, is_whole: bool = True) -> None:
        """is_whole: every line has an answer."""
        ordered = self._target.with_name(self._target.name + BESIDE[1])
        with self._aside.open("rb") as aside, open(ordered, "wb", opener=self._opener) as file:
            for line in self._lines():
                if line.fault:
                    answer = error_line(line)
                elif line.key not in places and not is_whole:
                    continue
                else:
                    place = places[line.key]
                    aside.seek(place.start)
                    answer = aside.read(place.length)
                file.write(answer + b"\n")
            file.flush()
            os.fsync(file.fileno())
        ordered.replace(self._target)
        if is_whole and any(place.status >= FIRST_FAULT for place in places.values()):
            return
        with contextlib.suppress(FileNotFoundError):
            self._aside.unlink()


async def _beside(
    function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs
) -> Result:
    """Call a function in a thread, so that streams go on. A cancelled call still waits for its end,
    since the next one may write the same files."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *given, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


class _Answer(msgspec.Struct):
    response: dict[str, msgspec.Raw] | None


def _status(answer: bytes) -> int:
    try:
        response = msgspec.json.decode(answer, type=_Answer).response
        return 0 if response is None else msgspec.json.decode(response["status_code"], type=int)
    except (msgspec.DecodeError, KeyError):
        return FIRST_FAULT
