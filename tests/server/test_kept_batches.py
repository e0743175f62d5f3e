"""Files and batches over HTTP: answered on spare capacity, and taken up after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from quire.server.app import create_app
from quire.server.batches.store import BatchStore, NewFile
from quire.server.generation.backend import Backend
from quire.server.http.multipart import FormReader
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.waiting import WAIT_S, get, wait_for

ROUTE = "/v1/chat/completions"
LONG_STEP_S = 0.05
"""Seconds of a step with which a batch of thousands of steps is not over before it is looked at."""
KEYS = ("a" * 32, "b" * 32)


def line(custom_id: str, url: str = ROUTE, **more: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return json.dumps({
        "custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **more}
    })  # fmt: skip


def settings(folder: Path, **more: Any) -> ServerSettings:
    return ServerSettings(disable_access_log=True, data_dir=str(folder), **more)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(bundled_front(), settings(tmp_path)) as found:
        yield found


def client_of(server: RunningServer, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        timeout=WAIT_S,
        http_client=waiting.PatientClient(),
        **options,
    )


@pytest.fixture
def client(kept: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(kept) as found:
        yield found


@contextlib.contextmanager
def started(folder: Path, engine: InMemoryClient) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    with (
        running_server(bundled_front(), settings(folder), engine) as server,
        client_of(server) as client,
    ):
        yield server, client


def upload(client: openai.OpenAI, *lines: str) -> str:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return file.id


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    found: list[Any] = []

    def has_ended() -> bool:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "cancelled", "expired")

    wait_for(has_ended, "end of the batch")
    return found[0]


def test_files_are_kept(client: openai.OpenAI) -> None:
    data = line("one") + "\n"
    file = client.files.create(file=("requests.jsonl", io.BytesIO(data.encode())), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(data), "batch")
    other = upload(client, line("two"))
    assert [each.id for each in client.files.list()] == [other, file.id]
    assert [each.id for each in client.files.list(limit=1)] == [other, file.id]
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).text == data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.content(file.id)


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_what_is_kept_is_for_the_servers_user_alone(tmp_path: Path, umask: int) -> None:
    """Fault: files and folders were 644 and 755. What an older server left is narrowed too."""
    folder = tmp_path / "data"
    if umask == 0:
        (folder / "files").mkdir(parents=True)
        (folder / "batches.sqlite").touch(0o644)
    before = os.umask(umask)
    try:
        with started(folder, InMemoryClient()) as (_, client):
            batch = client.batches.create(
                input_file_id=upload(client, line("one"), "{}"),
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
            modes: dict[str, int] = {}

            def has_ended() -> bool:
                for path in folder.rglob("*"):
                    with contextlib.suppress(FileNotFoundError):
                        modes[path.name] = path.stat().st_mode & 0o777
                return client.batches.retrieve(batch.id).status == "completed"

            wait_for(has_ended, "end of the batch")
    finally:
        os.umask(before)
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o600} == {"files": "0o700"}
    assert {"batches.sqlite", "batches.sqlite-wal", "running"} <= modes.keys()
    if umask:
        assert folder.stat().st_mode & 0o777 == 0o700


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow, or be written to."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_is_said_and_files_can_be_deleted(
    kept: RunningServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Fault: all of it was a 500 that asked for a report, and nothing made room."""
    first, second = upload(client, line("one")), upload(client, line("two"))
    form = {"file": ("in.jsonl", line("three").encode())}
    asked = {"input_file_id": second, "endpoint": ROUTE, "completion_window": "24h"}
    with full_disk():
        replies = [
            waiting.post(f"{kept.url}/v1/files", data={"purpose": "batch"}, files=form),
            waiting.post(f"{kept.url}/v1/batches", json=asked),
        ]
        for reply in replies:
            assert reply.status_code == 507, reply.text
            assert "no room" in reply.json()["error"]["message"]
        reply = waiting.post(f"{kept.url}/v1/files", data={"purpose": "fine-tune"}, files=form)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "purpose")
        for _ in range(2):  # before and after it is known
            reply = waiting.delete(f"{kept.url}/v1/files/{first}")
        assert reply.status_code == 404
        assert [each.id for each in client.files.list()] == [second]
        with pytest.raises(openai.NotFoundError, match="no file"):
            client.files.retrieve(first)
    assert {path.name for path in (tmp_path / "files").iterdir()} == {second}
    third = upload(client, line("three"))
    batch = client.batches.create(
        input_file_id=third, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert finished(client, batch.id).status == "completed"
    store = BatchStore(tmp_path, Limits())
    assert store.num_files == 3, "two inputs and an output"
    store.close()


def test_answers_that_meet_a_full_disk_come_later(client: openai.OpenAI) -> None:
    file = upload(client, *(line(str(i)) for i in range(3)))
    batch = client.batches.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
    )
    with full_disk():
        time.sleep(1.0)
        assert client.batches.retrieve(batch.id).status != "failed"
    found = finished(client, batch.id)
    assert (found.status, found.request_counts.completed) == ("completed", 3)
    assert len(client.files.content(found.output_file_id).text.splitlines()) == 3


def test_a_page_has_1_to_100_items(client: openai.OpenAI, kept: RunningServer) -> None:
    """Fault: a limit is checked in part, and read whole."""
    upload(client, line("one"))
    for path in ("files", "batches"):
        for limit in ("0000000010" + "0" * 5000, "100" + "0" * 7, "0", "101", "-1", "\u00b2", ""):
            reply = get(f"{kept.url}/v1/{path}", params={"limit": limit})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "limit", limit[
                :20
            ]
        for limit in ("1", "007", "100"):
            assert get(f"{kept.url}/v1/{path}", params={"limit": limit}).status_code == 200


def test_a_batch_is_answered(client: openai.OpenAI, kept: RunningServer) -> None:
    ids = [f"line-{number}" for number in range(30)]
    bad = line("bad", temperature=-1)
    source = upload(client, *map(line, ids), bad, "{", line("other", "/v1/completions"))
    asked = client.batches.create(
        input_file_id=source, endpoint=ROUTE, completion_window="24h", metadata={"name": "x"}
    )
    assert asked.status == "validating" and asked.metadata == {"name": "x"}
    batch = finished(client, asked.id)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed) == (33, 30)
    answers = client.files.content(batch.output_file_id).text.splitlines()
    found = [json.loads(each) for each in answers]
    assert [each["custom_id"] for each in found] == ids
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in found)
    failed = [
        json.loads(each) for each in client.files.content(batch.error_file_id).text.split("\n")[:-1]
    ]
    assert [each["custom_id"] for each in failed] == ["bad", None, "other"]
    added = kept.call(lambda: list(kept.client.added))
    assert len(added) == 30 and all(each.scheduling.is_spare for each in added)
    assert [each.id for each in client.batches.list()] == [asked.id]


def test_a_batch_of_nothing_fails(client: openai.OpenAI) -> None:
    asked = client.batches.create(
        input_file_id=upload(client, "{", "[]"), endpoint=ROUTE, completion_window="24h"
    )
    batch = finished(client, asked.id)
    assert batch.status == "failed" and len(batch.errors.data) == 2


def test_a_batch_is_cancelled(client: openai.OpenAI, kept: RunningServer) -> None:
    source = upload(client, *(line(f"line-{number}", max_tokens=300) for number in range(200)))
    asked = client.batches.create(input_file_id=source, endpoint=ROUTE, completion_window="24h")
    kept.wait_until_open()
    kept.client.step_s = LONG_STEP_S
    with pytest.raises(openai.BadRequestError, match="still reads"):
        client.files.delete(source)
    assert client.batches.cancel(asked.id).status == "cancelling"
    batch = finished(client, asked.id)
    assert batch.status == "cancelled" and batch.request_counts.completed < 200
    kept.wait_until_idle()
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(asked.id)


def test_interactive_requests_go_first(client: openai.OpenAI, kept: RunningServer) -> None:
    """Fault: somebody who chats waits behind a batch."""
    source = upload(client, *(line(f"line-{number}", max_tokens=300) for number in range(60)))
    asked = client.batches.create(input_file_id=source, endpoint=ROUTE, completion_window="24h")
    kept.wait_until_open(8)
    kept.client.step_s = LONG_STEP_S
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    counts = client.batches.retrieve(asked.id).request_counts
    assert counts is not None and counts.completed < 60, "the batch was first"
    client.batches.cancel(asked.id)
    finished(client, asked.id)


def test_a_restart_goes_on_where_the_server_ended(tmp_path: Path) -> None:
    first, second = InMemoryClient(), InMemoryClient()
    ids = [f"line-{number}" for number in range(80)]
    ended, step = list[Any](), first.engine.core.step

    def step_until_some_have_ended(now: float) -> Any:
        output = step(now)
        ended.extend(output.finished)
        first.paused = len(ended) >= 10
        return output

    first.engine.core.step = step_until_some_have_ended
    with started(tmp_path, first) as (_, client):
        source = upload(client, *map(line, ids))
        asked = client.batches.create(input_file_id=source, endpoint=ROUTE, completion_window="24h")
        aside = tmp_path / "files" / f"{asked.id}.out.partial"

        def are_written() -> bool:
            is_there = first.paused and aside.exists()
            return is_there and len(aside.read_bytes().splitlines()) == len(ended)

        wait_for(are_written, "answers of the batch")
    num_answered = len(aside.read_bytes().splitlines())
    assert num_answered == len(ended) < 80
    with started(tmp_path, second) as (_, client):
        batch = finished(client, asked.id)
        assert batch.status == "completed" and batch.request_counts.completed == 80
        found = client.files.content(batch.output_file_id).text.splitlines()
        assert [json.loads(each)["custom_id"] for each in found] == ids
    assert len(second.added) == 80 - num_answered, "a finished line was computed again"
    for each in (first, second):
        each.engine.core.shutdown()


def test_keys_see_their_own(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            running_server(bundled_front(), settings(tmp_path, api_key=KEYS))
        )
        one, other = (stack.enter_context(client_of(server, key)) for key in KEYS)
        source = upload(one, line("one"))
        batch = one.batches.create(input_file_id=source, endpoint=ROUTE, completion_window="24h")
        assert finished(one, batch.id).status == "completed"
        assert not list(other.files.list()) and not list(other.batches.list())
        for call in (
            lambda: other.files.content(source),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.create(
                input_file_id=source, endpoint=ROUTE, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        names = {each.scheduling.tenant for each in server.call(lambda: list(server.client.added))}
        assert len(names) == 1 and "" not in names


def test_a_second_key_hides_nothing_of_the_first(tmp_path: Path) -> None:
    """Fault: files that a lone key kept are nobody's any more when there is another one, which may
    not see them either. Files that were kept without a key are the lone one's too."""
    sources: list[str] = []
    for number, keys in enumerate(((), KEYS[:1], KEYS, (KEYS[1], KEYS[0]))):
        with (
            running_server(bundled_front(), settings(tmp_path, api_key=keys)) as server,
            client_of(server, KEYS[0], max_retries=0) as one,
        ):
            if number == 1:  # as a lone key's were kept before
                batch = one.batches.create(
                    input_file_id=sources[0], endpoint=ROUTE, completion_window="24h"
                ).id
                assert finished(one, batch).status == "completed"
            assert {each.id for each in one.files.list()} >= set(sources)
            if number > 1:
                assert one.batches.retrieve(batch).output_file_id
                other = one.with_options(api_key=KEYS[1])
                assert not list(other.files.list()) and not list(other.batches.list())
            sources.append(upload(one, line(f"{number}")))


def test_files_of_keys_that_are_gone_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They count in the bounds, and no key that is left can delete them."""
    before = BatchStore(tmp_path, Limits(), tenants=("old",))
    before.add_file("a.jsonl", "batch", b"x", "old")
    before.close()
    for tenants, is_told in ((("old",), False), (("old", "new"), False), (("new",), True)):
        caplog.clear()
        BatchStore(tmp_path, Limits(), tenants=tenants).close()
        assert ("1 files of API keys" in caplog.text) == is_told


def test_without_a_folder_nothing_is_kept(server: RunningServer) -> None:
    with waiting.PatientClient(base_url=server.url) as http:
        for reply in (
            http.get("/v1/files"),
            http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"}),
            http.post("/v1/batches", json={"input_file_id": "x", "endpoint": ROUTE}),
        ):
            assert reply.status_code == 404 and "--data-dir" in reply.text


def test_bad_requests(kept: RunningServer, client: openai.OpenAI) -> None:
    source = upload(client, line("one"))
    with waiting.PatientClient(base_url=kept.url) as http:
        cases: list[tuple[httpx.Response, int, str]] = [
            (http.post("/v1/files", json={}), 415, "multipart/form-data"),
            (http.post("/v1/files", files={"file": b"x"}), 400, "no field 'purpose'"),
            (
                http.post("/v1/files", files={"file": b"x"}, data={"purpose": "assistants"}),
                400,
                "purpose is 'assistants'",
            ),
            (
                http.post("/v1/files", files={"file": b""}, data={"purpose": "batch"}),
                400,
                "is empty",
            ),
            *(
                (
                    http.post(
                        "/v1/files", files={"file": b"x"}, data={"purpose": "batch", name: "1"}
                    ),
                    400,
                    f"a field '{name}'",
                )
                for name in ("expires_after[seconds]", "prupose")
            ),
            (
                http.post("/v1/batches", json={"input_file_id": "x", "endpoint": ROUTE}),
                404,
                "no file 'x'",
            ),
            (
                http.post("/v1/batches", json={"input_file_id": source, "endpoint": "/metrics"}),
                400,
                "endpoint is '/metrics'",
            ),
            (http.get("/v1/batches", params={"limit": "0"}), 400, "limit is '0'"),
            (http.get("/v1/batches", params={"after": "x"}), 400, "after is 'x'"),
        ]
        for reply, status, words in cases:
            assert reply.status_code == status and words in reply.text, reply.text


def test_bounds_on_files(tmp_path: Path) -> None:
    limits = Limits(max_kept_files=2, max_kept_file_bytes=100, max_open_batches=1)
    store = BatchStore(tmp_path, limits)
    first = store.add_file("a", "batch", b"x" * 60, "")
    with pytest.raises(RefusedError, match="max_kept_file_bytes"):
        store.add_file("b", "batch", b"x" * 50, "")
    store.add_file("b", "batch", b"x", "")
    with pytest.raises(RefusedError, match="max_kept_files"):
        store.add_file("c", "batch", b"x", "")
    store.add_batch(ROUTE, first.id, None, "", 1.0)
    with pytest.raises(RefusedError, match="max_open_batches"):
        store.add_batch(ROUTE, first.id, None, "", 1.0)
    store.close()


def read_form(body: bytes, size: int, content_type: str) -> tuple[FormReader, bytes]:
    """A form that came in pieces of this size, and the data of its file, which were taken."""
    form, data = FormReader(content_type, large="file"), b""
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
        if "file" in form.parts:
            data += form.parts["file"].take()
    return form, data


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_forms_are_read_whole(size: int) -> None:
    """Fault: bytes of a file that look like a boundary, or like the end of a line, are lost."""
    data = bytes(range(256)) + b"\r\n--wrong\r\n\r\n\n"
    head = (
        b'--right\r\nContent-Disposition: form-data; name="file"; filename="x.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n"
    )
    rest = (
        b'--right\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--right--\r\n'
    )
    kind = 'multipart/form-data; boundary="right"'
    form, found = read_form(head + data + b"\r\n" + rest, size, kind)
    parts = form.end()
    assert found == data and parts["file"].filename == "x.bin"
    assert parts["purpose"].text == "batch" and parts["purpose"].filename is None
    form, _ = read_form(head + data + b"\r\n" + rest[:-20], size, kind)
    with pytest.raises(RefusedError, match="ends early"):
        form.end()
    long = rest.replace(b"batch", b"b" * 2**17)
    for body, words in (
        (head + b"\r\n" + head + b"\r\n" + rest, "Send each field once"),
        (b"--right\r\nX: y\r\n\r\n\r\n" + rest, "has no name"),
        (b"--right\r\n" + b"x" * 2**15, "has no name"),
        (head + b"\r\n" + long, "'purpose' of the form has more than"),
    ):
        with pytest.raises(RefusedError, match=words):
            read_form(body, max(size, 7), kind)


async def upload_in_pieces(app: ASGIApp, data: bytes) -> int:
    """Upload a file, and return the status."""
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data
    purpose = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    body, size, at, status = file + purpose, 2**16, 0, 0
    headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
    scope: Any = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"", "headers": headers,
        "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> Any:
        nonlocal at
        at += size
        return {"type": "http.request", "body": body[at - size : at], "more_body": at < len(body)}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status


def test_a_large_file_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: all streams of a front stand still while a file is taken apart and written."""
    app, data = create_app(settings(tmp_path), Backend()), bytes(10 * 2**20)
    loops, waits = list[asyncio.AbstractEventLoop](), Counter[str]()

    def watch(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def watched(self: Any, piece: bytes) -> None:
            """Go on once the event loop has done something else."""
            assert threading.current_thread() is not threading.main_thread()
            turned = threading.Event()
            loops[0].call_soon_threadsafe(turned.set)
            assert turned.wait(WAIT_S), "the loop stands still"
            waits[name] += 1
            function(self, piece)

        monkeypatch.setattr(owner, name, watched)

    watch(FormReader, "feed")
    watch(NewFile, "write")

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        assert await upload_in_pieces(app, data) == 200

    asyncio.run(work())
    assert waits["feed"] > 1 and waits["write"] > 1
    (kept,) = [path for path in (tmp_path / "files").iterdir() if path.stat().st_size == len(data)]
    assert kept.read_bytes() == data
