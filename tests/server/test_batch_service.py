"""Batches beside what goes wrong: a cancel at the last moment, time that is over, lost files."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.server.app import create_app
from quire.server.batches import runner, service
from quire.server.batches.service import BatchService
from quire.server.batches.store import BatchStore, KeptBatch, NewFile
from quire.server.generation.backend import Backend, ServedModel
from quire.server.generation.served_model import model_dialect
from quire.server.requests import databases
from quire.server.requests.databases import open_database
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, bundled_front
from tests.waiting import WAIT_S

ROUTE = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


def lines(count: int, **more: Any) -> bytes:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2, **more}
    return b"".join(
        json.dumps({"custom_id": f"line-{number}", "url": ROUTE, "body": body}).encode() + b"\n"
        for number in range(count)
    )


class Harness:
    """A store, and a service over it that polls often."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = InMemoryClient()
        self.late_s = 0.0
        self.store = self.opened()

    def opened(self, limits: Limits | None = None) -> BatchStore:
        return BatchStore(self.folder, limits or Limits())

    def add(self, data: bytes) -> KeptBatch:
        file = self.store.add_file("in.jsonl", "batch", data, "")
        return self.store.add_batch(ROUTE, file.id, None, "", 1.0)

    def found(self, batch: KeptBatch) -> KeptBatch:
        return self.store.find_batch(batch.id, "")

    def answers(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(each) for each in self.store.path(file_id).read_bytes().splitlines()]

    def backend(self) -> Backend:
        front, backend = bundled_front(), Backend()
        backend.serve(self.engine)
        backend.set_model(ServedModel((MODEL,), MODEL, 1, front, 0, model_dialect(front)))
        return backend

    @asynccontextmanager
    async def running(
        self, limits: Limits | None = None, poll_s: float = 0.02
    ) -> AsyncGenerator[asyncio.Task[None]]:
        backend = self.backend()
        app = create_app(ServerSettings(disable_access_log=True), backend)
        service = BatchService(
            app,
            backend,
            self.store,
            limits or Limits(),
            poll_s=poll_s,
            clock=lambda: time.time() + self.late_s,
        )
        task = asyncio.create_task(service.run())
        try:
            async with asyncio.timeout(WAIT_S):
                yield task
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def ended(self, batch: KeptBatch, **more: Any) -> KeptBatch:
        """A batch when the service is done with it."""

        async def work() -> None:
            async with self.running(**more) as task:
                await self.until(lambda: self.found(batch).status in ENDED, task)

        asyncio.run(work())
        return self.found(batch)

    async def until_ended(self, batch: KeptBatch) -> None:
        while self.found(batch).status not in ENDED:
            await asyncio.sleep(0.01)

    async def until(self, is_so: Callable[[], bool], task: asyncio.Task[None]) -> None:
        while not is_so():
            assert not task.done(), "the service has ended"
            await asyncio.sleep(0.01)


def test_a_mark_of_byte_order_costs_no_line(harness: Harness) -> None:
    """Fault: the first line was no JSON."""
    found = harness.ended(harness.add(b"\xef\xbb\xbf" + lines(2)))
    assert (found.status, found.request_counts.completed) == ("completed", 2)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    found = Harness(tmp_path)
    yield found
    found.store.close()
    found.engine.engine.core.shutdown()


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_an_end_after_the_last_answer_keeps_the_answers(harness: Harness, how: str) -> None:
    """Fault: an end of a batch between its last answer and the next look loses all of them."""
    batch = harness.add(lines(5))
    target = harness.store.path(f"{batch.id}.out")

    async def work() -> None:
        async with harness.running(poll_s=WAIT_S / 2) as task:
            harness.engine.paused = True  # else it may be over before anybody looks
            await harness.until(lambda: harness.found(batch).status == "in_progress", task)
            if how == "expired":
                harness.late_s = 90_000.0
            else:
                harness.store.cancel_batch(batch.id, "")
            harness.engine.paused = False
            await harness.until(lambda: harness.found(batch).status in ENDED, task)

    asyncio.run(work())
    found = harness.found(batch)
    assert not target.exists() and found.status in (how, "completed")
    assert len(harness.answers(found.output_file_id)) == 5
    if how == "cancelled":
        assert found.status == "cancelled" and found.cancelling_at is not None
        assert found.cancelled_at is not None and found.completed_at is None


def test_a_cancel_meets_what_has_ended_meanwhile(harness: Harness) -> None:
    """Fault: a cancel that read the batch just before its end writes over "completed"."""
    batch = harness.add(lines(1))
    other = harness.opened()
    find = other.find_batch

    def late(batch_id: str, tenant: str) -> KeptBatch:
        found = find(batch_id, tenant)
        if found.is_unfinished:
            harness.store.end_batch(harness.found(batch), "completed")
        return found

    other.find_batch = late
    with pytest.raises(RefusedError, match="is completed"):
        other.cancel_batch(batch.id, "")
    other.close()
    assert harness.found(batch).status == "completed"


def test_a_lost_file_fails_its_batch_alone(harness: Harness) -> None:
    """Fault: a batch whose file is gone is tried for ever, and those behind it wait."""
    lost, other = harness.add(lines(1)), harness.add(lines(1))
    harness.store.path(lost.input_file_id).unlink()
    assert harness.ended(other).status == "completed"
    found = harness.found(lost)
    assert found.status == "failed" and found.errors is not None
    assert lost.input_file_id in found.errors["data"][0]["message"]


def test_a_locked_database_is_waited_for(harness: Harness) -> None:
    """Fault: any other error than two kinds ends the service, until the server starts again."""
    batch = harness.add(lines(3))
    store = harness.store
    find, note, num_faults = store.next_batch, store.note_progress, 0

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            nonlocal num_faults
            num_faults += 1
            if num_faults < 4:
                raise sqlite3.OperationalError("database is locked")
            return function(*given)

        return call

    store.next_batch, store.note_progress = locked(find), locked(note)
    assert harness.ended(batch).status == "completed" and num_faults >= 4


def test_a_line_that_a_route_fails_at_has_an_answer(harness: Harness) -> None:
    """Fault: an exception that no handler knows ends the batch, and not its line alone."""
    batch = harness.add(lines(3))
    add, num_added = harness.engine.add, 0

    async def failing(*given: Any, **more: Any) -> Any:
        nonlocal num_added
        num_added += 1
        if num_added == 2:
            raise ZeroDivisionError("a fault of ours")
        return await add(*given, **more)

    harness.engine.add = failing
    found = harness.ended(batch)
    assert found.status == "completed" and found.request_counts.completed == 2
    (answer,) = harness.answers(found.error_file_id)
    assert answer["response"]["status_code"] == 500
    assert "its log says why" in answer["response"]["body"]["error"]["message"].lower()


@pytest.mark.parametrize("num_faults", [2, 10**9])
def test_an_unknown_fault_is_met_a_few_times(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, num_faults: int
) -> None:
    """Fault: a batch at which the server always fails is tried for ever, and those behind it
    wait."""
    bad, other = harness.add(lines(2)), harness.add(lines(2))
    split, num_met = service._split, 0

    def failing(target: Path, *parts: Path) -> tuple[int, int]:
        nonlocal num_met
        if bad.id in target.name and num_met < num_faults:
            num_met += 1
            raise ZeroDivisionError("a fault of ours")
        return split(target, *parts)

    monkeypatch.setattr(service, "_split", failing)
    assert harness.ended(other).status == "completed"
    found = harness.found(bad)
    if num_faults == 2:
        assert found.status == "completed" and found.errors is None
        return
    assert found.status == "failed" and found.failed_at and found.errors is not None
    (fault,) = found.errors["data"]
    assert fault["code"] == "server_error" and "ZeroDivisionError" in fault["message"]
    assert not list((harness.folder / "files").glob(f"{bad.id}*"))


def test_a_batch_that_is_given_up_keeps_its_answers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [lines(6, max_tokens=2 + 15 * number).splitlines()[number] for number in range(6)]
    batch = harness.add(b"\n".join(data))
    run, num_runs = runner.BatchRunner.run, 0

    async def failing(self: runner.BatchRunner, on_line: Callable[[], None]) -> Any:
        nonlocal num_runs
        num_runs += 1
        num_done = 0

        def one() -> None:
            nonlocal num_done
            num_done += 1
            if num_done > 3:
                raise ZeroDivisionError("a fault of ours")
            on_line()

        return await run(self, one)

    monkeypatch.setattr(runner.BatchRunner, "run", failing)
    found = harness.ended(batch)
    assert found.status == "failed" and num_runs == 3
    assert 4 <= len(harness.answers(found.output_file_id)) < 6


def test_large_batches_are_read_and_written_beside_the_loop(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: all streams of a front stand still while the lines and answers of a batch, which was
    taken up again or has ended, are read and put in order."""
    threads: list[threading.Thread] = []

    def watched(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*given: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*given)

        monkeypatch.setattr(module, name, call)

    watched(runner, "read_line")
    watched(runner, "_status")
    watched(runner.os, "fsync")
    watched(service, "_split")
    data = lines(300)
    batch = harness.add(data)
    batch.status, batch.in_progress_at, batch.request_counts.total = "in_progress", 1, 300
    assert harness.store.note_progress(batch, "validating")
    aside = harness.store.path(f"{batch.id}.out{runner.PARTIAL}")
    with aside.open("wb") as file:
        for text in data.splitlines()[:299]:
            line = runner.read_line(text, set(), len(text))
            answer = runner.result_line(line, 200, "x", b"{}")
            file.write(line.key.encode() + b" " + answer + b"\n")
    threads.clear()
    found = harness.ended(batch)
    assert found.status == "completed" and found.request_counts.completed == 300
    assert len(harness.engine.added) == 1
    assert len(threads) >= 300 + 299 + 300 and threading.main_thread() not in threads


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_whose_time_is_over_is_not_begun(harness: Harness, is_cancelled: bool) -> None:
    batch = harness.add(lines(3))
    if is_cancelled:
        harness.store.cancel_batch(batch.id, "")
    else:
        harness.late_s = 90_000.0
    assert harness.ended(batch).status == ("cancelled" if is_cancelled else "expired")
    assert not harness.engine.added


def test_a_file_of_too_many_lines_is_not_read_whole(harness: Harness) -> None:
    """Fault: a file of bad lines fills the memory with a sentence about each."""
    batch = harness.add(b"x\n" * 1_000_000)
    tracemalloc.start()
    found = harness.ended(batch, limits=Limits(max_batch_lines=3000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.status == "failed" and found.errors is not None
    (fault,) = found.errors["data"]
    assert "more than 3000 lines" in fault["message"]
    assert peak < 16 * 2**20, f"{peak} bytes"


def test_the_first_faults_are_shown(harness: Harness) -> None:
    found = harness.ended(harness.add(b"x\n" * 500))
    assert found.status == "failed" and found.errors is not None
    assert found.request_counts.total == 500 and len(found.errors["data"]) == 100
    assert found.errors["data"][99]["message"].startswith("Line 100: ")


def test_answers_need_room(harness: Harness) -> None:
    """Fault: answers of batches fill the disk, however few bytes files may have."""
    most = 6000
    harness.store.close()
    harness.store = harness.opened(Limits(max_kept_file_bytes=most))
    found = harness.ended(harness.add(lines(20)))
    assert found.status == "failed" and found.errors is not None and found.failed_at
    assert "max_kept_file_bytes" in found.errors["data"][0]["message"]
    assert 0 < len(harness.answers(found.output_file_id)) < 20
    kept = sum(path.stat().st_size for path in (harness.folder / "files").iterdir())
    assert kept == sum(each.bytes for each in harness.store.list_files("")) <= most


def test_a_file_that_cannot_be_kept_leaves_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: parts of files that met a full disk stay on it."""

    write = NewFile.write

    def full(self: NewFile, data: bytes) -> None:
        write(self, data[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(NewFile, "write", full)
    with pytest.raises(OSError, match="no space"):
        harness.add(lines(1))
    assert not list((harness.folder / "files").iterdir())


def test_a_file_that_is_locked_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: fronts end, since another one that begins the file has a slow disk."""
    path, pauses = tmp_path / "a.sqlite", list[float]()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 200:
                other.execute("COMMIT")

        monkeypatch.setattr(databases, "time", SimpleNamespace(sleep=pause, monotonic=lambda: 0.0))
        monkeypatch.setattr(databases, "BUSY_S", 0.0)
        open_database(path, "CREATE TABLE IF NOT EXISTS a (b)", is_lasting=True).close()
    assert len(pauses) == 200


def test_fronts_open_a_new_folder_together(tmp_path: Path) -> None:
    """Fault: some of several fronts that start at once end, since the database is locked."""
    for number in range(30):
        folder, barrier = tmp_path / f"{number}", threading.Barrier(12)

        def opened(folder: Path, barrier: threading.Barrier) -> None:
            barrier.wait()
            BatchStore(folder, Limits()).close()

        with ThreadPoolExecutor(12) as pool:
            for each in [pool.submit(opened, folder, barrier) for _ in range(12)]:
                each.result()


def test_one_of_several_fronts_runs_the_batches(harness: Harness) -> None:
    """Fault: no front runs batches if fronts are numbered from 1, or each of them does."""

    async def work() -> None:
        batches = [harness.add(lines(5))]
        async with asyncio.timeout(WAIT_S), AsyncExitStack() as second:
            async with AsyncExitStack() as first:
                for number, stack in enumerate((first, second), 1):
                    app = create_app(
                        ServerSettings(disable_access_log=True, data_dir=str(harness.folder)),
                        harness.backend(),
                        front=number,
                    )
                    await stack.enter_async_context(app.router.lifespan_context(app))
                await harness.until_ended(batches[0])
                assert len(harness.engine.added) == 5
            batches.append(harness.add(lines(5)))
            await harness.until_ended(batches[1])
        assert len(harness.engine.added) == 10
        assert [harness.found(each).status for each in batches] == ["completed"] * 2

    asyncio.run(work())


def test_one_key_leaves_room_to_others(tmp_path: Path) -> None:
    """Fault: one key takes all files, bytes and batches of the server."""
    limits = Limits(max_kept_files=4, max_kept_file_bytes=100, max_open_batches=2)
    store = BatchStore(tmp_path, limits, tenants=("a", "b"))
    first = store.add_file("a", "batch", b"x" * 45, "a")
    assert store.has_room(5, "a") and not store.has_room(6, "a") and store.has_room(6, "b")
    with pytest.raises(RefusedError, match=r"This key keeps 1 files of 45 bytes.* 2 of 50 "):
        store.add_file("b", "batch", b"x" * 6, "a")
    store.add_file("b", "batch", b"x", "a")
    with pytest.raises(RefusedError, match="max_kept_files"):
        store.add_file("c", "batch", b"x", "a")
    store.add_batch(ROUTE, first.id, None, "a", 1.0)
    with pytest.raises(RefusedError, match="1 batches of this key wait already"):
        store.add_batch(ROUTE, first.id, None, "a", 1.0)
    other = store.add_file("c", "batch", b"x" * 50, "b")
    store.add_batch(ROUTE, other.id, None, "b", 1.0)
    with pytest.raises(RefusedError, match="The server keeps 3 files of 96 bytes"):
        store.add_file("d", "batch", b"x" * 5, "c")
    with pytest.raises(RefusedError, match="2 batches wait already"):
        store.add_batch(ROUTE, store.add_file("e", "batch", b"x", "c").id, None, "c", 1.0)
    store.close()


def test_a_restart_tells_some_answers_from_all(harness: Harness) -> None:
    """Fault: a server that ended while it ended an expired batch calls it completed."""
    batch = harness.add(lines(3))
    batch.status, batch.in_progress_at, batch.request_counts.total = "in_progress", 1, 3
    assert harness.store.note_progress(batch, "validating")
    answer = {"custom_id": "line-0", "response": {"status_code": 200}}
    harness.store.path(f"{batch.id}.out").write_text(json.dumps(answer) + "\n")
    harness.late_s = 90_000.0
    found = harness.ended(batch)
    assert found.status == "expired" and len(harness.answers(found.output_file_id)) == 1
