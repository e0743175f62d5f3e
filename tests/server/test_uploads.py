"""Bounds of the memory and disk that an upload may take on the server."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from quire.server.batches.store import BatchStore
from quire.server.http.body import BodyReader
from quire.server.http.multipart import FormReader
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from tests.waiting import in_a_loop

MIB = 2**20


def upload(num_bytes: int) -> Request:
    """A request with a body of zeros."""
    left = num_bytes

    async def receive() -> Any:
        nonlocal left
        left -= 2**16
        return {"type": "http.request", "body": bytes(2**16), "more_body": left > 0}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@in_a_loop
async def test_what_is_on_the_disk_is_not_in_memory() -> None:
    """Fault: long uploads refuse all bodies, though a MiB of each is held."""
    bodies, sizes = BodyReader(Limits(max_body_bytes_in_flight=3 * MIB)), list[int]()

    def take(data: bytes) -> None:
        sizes.append(len(data))
        assert bodies.in_flight.num_bytes <= 2 * MIB

    await bodies.read_upload(upload(8 * MIB), take)
    assert sum(sizes) == 8 * MIB and not bodies.in_flight.num_bytes


@in_a_loop
async def test_a_disk_that_fails_leaves_nothing_counted() -> None:
    bodies = BodyReader(Limits())

    def take(data: bytes) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        await bodies.read_upload(upload(8 * MIB), take)
    assert not bodies.in_flight.num_bytes


def test_what_follows_a_form_is_not_kept() -> None:
    """Fault: behind a short form come as many bytes as a file may have, into memory."""
    form = FormReader("multipart/form-data; boundary=x", large="file")
    form.feed(b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\ndata\r\n--x--\r\n')
    piece = bytes(MIB)
    tracemalloc.start()
    try:
        for _ in range(16):
            form.feed(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB and form.end()["file"].text == "data"


def test_uploads_share_the_bounds_while_they_come(tmp_path: Path) -> None:
    """Fault: each finds room alone, and together they fill the disk."""
    store = BatchStore(tmp_path, Limits(max_kept_file_bytes=3000, max_kept_files=2))
    with store.new_file("") as first:
        first.write(bytes(2000))
        with store.new_file("") as second:
            with pytest.raises(RefusedError, match="max_kept_file_bytes"):
                second.write(bytes(2000))
            with pytest.raises(RefusedError, match="max_kept_files"), store.new_file(""):
                pass
        first.write(bytes(1000))
        assert not store.has_room(1, "")
        first.keep("a", "batch")
    with store.new_file("") as third, pytest.raises(RefusedError, match="max_kept_file_bytes"):
        third.write(b"x")
    assert len(list((tmp_path / "files").iterdir())) == 1
    store.close()


def test_a_start_clears_what_a_kill_has_left(tmp_path: Path) -> None:
    """But not the file that another front is writing, and not the answers of a batch."""
    BatchStore(tmp_path, Limits()).close()
    for name, age_s in (("file-a", 4000), ("file-b", 60), ("batch_c.out", 4000)):
        path = tmp_path / "files" / f"{name}.partial"
        path.touch()
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))
    with contextlib.closing(BatchStore(tmp_path, Limits())):
        left = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert left == ["batch_c.out.partial", "file-b.partial"]
