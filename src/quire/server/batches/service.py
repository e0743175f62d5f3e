"""Runs the batches of a server one after the other, on capacity that interactive requests leave."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from quire.base.errors import ConfigError, EngineError
from quire.server.batches.lines import read_line, texts_of_lines
from quire.server.batches.runner import (
    PARTIAL,
    BatchFiles,
    BatchRunner,
    LineRules,
    NoRoomError,
)
from quire.server.batches.store import BatchStore, KeptBatch
from quire.server.generation.backend import Backend
from quire.server.http.gate import InternalCaller
from quire.server.requests.databases import private
from quire.server.requests.limits import Limits

__all__ = ["BatchService"]

logger = logging.getLogger("quire.server")

POLL_S = 1.0
PATIENT_TRIES = 2**31
"""Tries per line: a line that finds no room waits until there is some."""
MAX_SHOWN_FAULTS = 100
MAX_FAILURES = 3
"""A batch fails after this many unexpected failures of the server."""


_KNOWN = (EngineError, OSError, sqlite3.OperationalError)
"""Faults of the machine, which pass; batches wait for as long as they last."""


class BatchService:
    """Runs in each of a server's fronts; the one that claims the folder serves. A batch that was
    running when the server or front ended continues, without computing answered lines again."""

    def __init__(
        self,
        app: ASGIApp,
        backend: Backend,
        store: BatchStore,
        limits: Limits,
        *,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """app: answers the lines. backend: backend of the app."""
        self._app = app
        self._backend = backend
        self._store = store
        self._limits = limits
        self._poll_s = poll_s
        self._clock = clock
        self._num_failures: Counter[str] = Counter()
        """Unexpected failures by batch."""

    async def run(self) -> None:
        """Run batches for ever. Failures are logged and tried again, unexpected ones a few
        times."""
        while True:
            try:
                is_busy = await self._serve_next()
            except Exception as error:
                is_known = isinstance(error, _KNOWN)
                logger.warning("batches wait: %s", error, exc_info=None if is_known else error)
                is_busy = False
            if not is_busy:
                await asyncio.sleep(self._poll_s)

    async def _serve_next(self) -> bool:
        """Finish the oldest batch. Returns False if there is none, no engine to run it, or another
        front runs them."""
        if not self._store.claim():
            return False
        found = self._store.next_batch()
        status = self._backend.status
        if found is None or status.capacity is None:
            return False
        batch, tenant, weight = found
        caller = InternalCaller(tenant, weight)
        try:
            await self._serve(batch, caller, status.capacity.max_num_seqs)
        except (ConfigError, FileNotFoundError) as error:
            self._fail(batch, "missing_file", [str(error)])
        except _KNOWN:
            raise
        except Exception as error:
            self._num_failures[batch.id] += 1
            if self._num_failures[batch.id] < MAX_FAILURES:
                raise
            logger.exception("the batch %s is given up", batch.id)
            await self._give_up(batch, caller, type(error).__name__)
        self._num_failures.pop(batch.id, None)
        return True

    async def _give_up(self, batch: KeptBatch, caller: InternalCaller, reason: str) -> None:
        """End a batch at which the server failed, with the answers so far."""
        fault = f"The server failed {MAX_FAILURES} times at this batch ({reason}). Its log says why"
        batch.errors = _faults("server_error", [f"{fault}; please report it."])
        target = self._target(batch)
        try:
            if not target.exists():
                await self._runner(batch, caller, target, 1).write_what_is_there()
            await self._end(batch, target, "failed", caller.tenant)
        except _KNOWN:
            raise  # the answers stay, and the next poll tries again
        except Exception:
            logger.exception("the batch %s has no answers", batch.id)
            self._store.end_batch(batch, "failed")
            for left in target.parent.glob(f"{target.stem}.*"):
                left.unlink()

    def _fail(self, batch: KeptBatch, code: str, faults: list[str]) -> None:
        """End a batch that cannot be served."""
        logger.warning("the batch %s has failed: %s", batch.id, faults[0])
        batch.errors = _faults(code, faults)
        self._store.end_batch(batch, "failed")

    async def _serve(self, batch: KeptBatch, caller: InternalCaller, max_together: int) -> None:
        is_over = self._clock() > batch.expires_at
        if batch.in_progress_at is None and (is_over or batch.status == "cancelling"):
            self._store.end_batch(batch, "expired")  # or cancelled before it began
            return
        if batch.status == "validating" and not await self._begin(batch):
            return
        target = self._target(batch)
        if target.exists():  # the server ended after the last line, before the status was written
            await self._end(batch, target, "expired" if is_over else "completed", caller.tenant)
            return
        runner = self._runner(batch, caller, target, max_together)
        ending = "cancelled" if batch.status == "cancelling" else await self._run(batch, runner)
        if not target.exists():
            await runner.write_what_is_there()
        await self._end(batch, target, ending, caller.tenant)

    def _target(self, batch: KeptBatch) -> Path:
        """File of all answers, in order."""
        return self._store.path(f"{batch.id}.out")

    def _runner(
        self, batch: KeptBatch, caller: InternalCaller, target: Path, max_together: int
    ) -> BatchRunner:
        files = BatchFiles(
            self._store.path(batch.input_file_id),
            target,
            lambda num_bytes: self._store.has_room(num_bytes, caller.tenant),
            private,
        )
        return BatchRunner(
            self._app,
            self._backend,
            files,
            LineRules(self._limits.max_body_bytes, batch.endpoint),
            max_together=max_together,
            caller=caller,
            max_tries=PATIENT_TRIES,
        )

    async def _begin(self, batch: KeptBatch) -> bool:
        """Count the lines. Returns False if none is a request; the batch has failed then."""
        source = self._store.path(batch.input_file_id)
        limits, most = self._limits, self._limits.max_batch_lines
        total, num_faulty, faults = await asyncio.to_thread(
            _survey, source, batch.endpoint, most, limits.max_body_bytes
        )
        if not total or total > most:
            has = f"more than {most}" if total else "no"
            faults = [f"The file has {has} lines, but a batch has 1 to {most} (max_batch_lines)."]
        else:
            batch.request_counts.total = total
        if not total or total > most or num_faulty == total:
            self._fail(batch, "invalid_line", faults)
            return False
        batch.status, batch.in_progress_at = "in_progress", int(self._clock())
        if not self._store.note_progress(batch, "validating"):  # it was cancelled meanwhile
            batch.status = "cancelling"
        return True

    async def _run(self, batch: KeptBatch, runner: BatchRunner) -> str:
        """Answer the lines, and return the final status."""
        running = asyncio.create_task(runner.run(lambda: None))
        try:
            while not running.done():
                await asyncio.wait((running,), timeout=self._poll_s)
                self._count(batch, runner)
                if not self._store.note_progress(batch, "in_progress"):
                    return "cancelled"
                if self._clock() > batch.expires_at:
                    return "expired"
            await running
            return "completed"
        except NoRoomError as error:
            batch.errors = _faults("no_room", [str(error)])
            return "failed"
        finally:
            running.cancel()
            await asyncio.wait((running,))

    def _count(self, batch: KeptBatch, runner: BatchRunner) -> None:
        counts = runner.counts
        batch.request_counts.failed = counts.num_failed
        batch.request_counts.completed = counts.num_done - counts.num_failed

    async def _end(self, batch: KeptBatch, target: Path, ending: str, tenant: str) -> None:
        """Store the answers as the client's files, good and bad ones apart."""
        good, bad = target.with_suffix(".good"), target.with_suffix(".bad")
        counts = batch.request_counts
        batch.finalizing_at = int(self._clock())
        target.with_name(target.name + PARTIAL).unlink(missing_ok=True)
        counts.completed, counts.failed = await asyncio.to_thread(_split, target, good, bad)
        if ending != "cancelled":
            is_whole = counts.completed + counts.failed == counts.total
            batch.errors = None if is_whole else batch.errors
            ending = "completed" if is_whole else "failed" if ending == "completed" else ending
        parts = (good, counts.completed, "output"), (bad, counts.failed, "error")
        for part, count, name in parts:
            if count:
                file_id = f"file-{batch.id.removeprefix('batch_')}-{name}"
                filename = f"{batch.id}_{name}.jsonl"
                self._store.adopt(part, file_id, filename, "batch_output", tenant)
                setattr(batch, f"{name}_file_id", file_id)
            else:
                part.unlink()
        self._store.end_batch(batch, ending)
        target.unlink()


def _faults(code: str, faults: list[str]) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": each} for each in faults]}


class _Answer(msgspec.Struct):
    response: dict[str, msgspec.Raw] | None


def _survey(source: Path, route: str, most: int, max_line_bytes: int) -> tuple[int, int, list[str]]:
    """Return the number of lines, the number of bad lines, and the faults of the first bad ones.
    Stops one line after `most`."""
    seen: set[str] = set()
    total, num_faulty, faults = 0, 0, list[str]()
    with source.open("rb") as file:
        for text in texts_of_lines(file):
            total += 1
            if total > most:
                break
            fault = read_line(text, seen, max_line_bytes, route).fault
            num_faulty += bool(fault)
            if fault and len(faults) < MAX_SHOWN_FAULTS:
                faults.append(f"Line {total}: {fault}")
    return total, num_faulty, faults


def _split(target: Path, good: Path, bad: Path) -> tuple[int, int]:
    """Split a file of answers by whether they are good, and return the number of each."""
    counts = [0, 0]
    with (
        target.open("rb") as file,
        open(good, "wb", opener=private) as first,
        open(bad, "wb", opener=private) as second,
    ):
        for text in file:
            response = msgspec.json.decode(text, type=_Answer).response
            is_bad = response is None or bytes(response["status_code"]) != b"200"
            (second if is_bad else first).write(text)
            counts[is_bad] += 1
    return counts[0], counts[1]
