"""Batches beside what goes wrong: a cancel at the last moment, time that is over, lost files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.server.app import create_app
from quire.server.batches.service import BatchService
from quire.server.batches.store import BatchStore, KeptBatch
from quire.server.generation.backend import Backend, ServedModel
from quire.server.generation.served_model import model_dialect
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

    @asynccontextmanager
    async def running(
        self, limits: Limits | None = None, poll_s: float = 0.02
    ) -> AsyncGenerator[asyncio.Task[None]]:
        front, backend = bundled_front(), Backend()
        backend.serve(self.engine)
        backend.set_model(ServedModel((MODEL,), MODEL, 1, front, 0, model_dialect(front)))
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

    async def until(self, is_so: Callable[[], bool], task: asyncio.Task[None]) -> None:
        while not is_so():
            assert not task.done(), "the service has ended"
            await asyncio.sleep(0.01)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    found = Harness(tmp_path)
    yield found
    found.store.close()
    found.engine.engine.core.shutdown()


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_an_end_after_the_last_answer_keeps_the_answers(harness: Harness, how: str) -> None:
    """Fault: what ends a batch between its last answer and the next look loses all of them."""
    batch = harness.add(lines(5))
    target = harness.store.path(f"{batch.id}.out")

    async def work() -> None:
        async with harness.running(poll_s=0.5) as task:
            await harness.until(lambda: harness.found(batch).status == "in_progress", task)
            if how == "expired":
                harness.late_s = 90_000.0
            else:
                harness.store.cancel_batch(batch.id, "")
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
