"""Sessions in a file beside the K/V on disk, across ends and kills of a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.kv_disk.folder import KVFolder
from quire.config.kv_disk.pins import read_pins
from quire.protocol.pins import prefix_key
from quire.server.requests.limits import Limits
from quire.server.sessions import kept
from quire.server.sessions.kept import KeptSessions
from quire.server.sessions.store import Session, SessionStore
from tests import waiting
from tests.server.test_kv_disk import end, serving
from tests.server.test_run import Serving, children
from tests.waiting import WAIT_S, in_a_loop, wait_for

KEYS = ("a" * 16, "b" * 16)
IDENTITY = "0" * 32
SECRET = "The treasure lies below the third oak."


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is slow where others write too."""
    monkeypatch.setattr(kept, "SECONDS_TO_READ", WAIT_S)
    monkeypatch.setattr(kept, "SECONDS_TO_WRITE", WAIT_S)


async def opened(folder: Path, limits: Limits | None = None) -> tuple[SessionStore, KeptSessions]:
    """A server's store, with what an earlier one left in the folder."""
    (folder / IDENTITY).mkdir(exist_ok=True)
    store = SessionStore(limits or Limits(), None)
    file = KeptSessions(store)
    await file.open(folder / IDENTITY)
    return store, file


async def names_after_restart(folder: Path, **limits: Any) -> list[str]:
    store, file = await opened(folder, Limits(**limits))
    found = sorted(session.id for session, _ in store.listed(""))
    await file.close()
    return found


def file_of(folder: Path) -> Path:
    return folder / IDENTITY / "sessions.sqlite"


def run(test: Any) -> None:
    in_a_loop(test)()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that others use too is no disk that hangs."""
    monkeypatch.setattr(kept, "SECONDS_TO_READ", WAIT_S)
    monkeypatch.setattr(kept, "SECONDS_TO_WRITE", WAIT_S)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        store, file = await opened(tmp_path)
        for name, tenant in (("a", ""), ("a", "key"), ("b", "")):
            store.put(Session(name, salt=tenant, token_ids=[5, 6], messages=[{"x": 1}]), tenant)
        store.change("a", "", is_pinned=True, ttl_s=500.0)
        turn = store.required("b", "")
        turn.token_ids = [7]
        assert store.put(turn, "")
        await file.close()
        assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600
        again, file = await opened(tmp_path)
        for tenant, name in (("", "a"), ("key", "a"), ("", "b")):
            assert again.required(name, tenant) == store.required(name, tenant)
        ((_, left),) = again.listed("key")
        assert left == pytest.approx(store.listed("key")[0][1], abs=WAIT_S)
        (pinned,) = again.all_pinned()
        assert (pinned[0].id, pinned[1], pinned[0].ttl_s) == ("a", "", 500.0)
        turn = again.required("b", "")
        assert again.put(turn, "") and again.required("b", "").version == 3
        await file.close()

    run(work)


def test_what_ended_does_not_come_back(tmp_path: Path) -> None:
    """Deleted, expired, or gone to make room; also what is left of it in the file."""

    async def work() -> None:
        store, file = await opened(tmp_path, Limits(max_sessions=3))
        store.put(Session("deleted", messages=[{"content": SECRET}]), "")
        store.put(Session("expired"), "")
        await file.written()
        assert SECRET.encode() in file_of(tmp_path).read_bytes()
        store.change("expired", "", ttl_s=1e-3)
        store.delete("deleted", "")
        for name in "abcd":
            store.put(Session(name), "")
        await file.written()
        assert SECRET.encode() not in file_of(tmp_path).read_bytes()
        await file.close()
        assert await names_after_restart(tmp_path, max_sessions=3) == ["b", "c", "d"]
        assert await names_after_restart(tmp_path, max_sessions=2) == ["c", "d"]
        assert await names_after_restart(tmp_path) == ["c", "d"]

    run(work)


def test_a_deletion_is_on_the_disk_when_its_caller_knows(tmp_path: Path) -> None:
    async def work() -> None:
        store, file = await opened(tmp_path)
        store.put(Session("a"), "")
        await file.written()
        store.delete("a", "")
        await file.written()
        assert await names_after_restart(tmp_path) == []
        await file.close()

    run(work)


@pytest.mark.parametrize("fault", ["no database", "foreign", "page", "session"])
def test_a_damaged_file_is_a_warning(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """New sessions are kept all the same."""

    async def work() -> None:
        store, file = await opened(tmp_path)
        store.put(Session("old", messages=[{"content": "x" * 100_000}]), "")
        store.put(Session("whole"), "")
        await file.close()
        path = file_of(tmp_path)
        if fault == "no database":
            path.write_bytes(b"nothing of that kind" * 1000)
        elif fault == "page":
            content = path.read_bytes()
            path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
        else:
            with sqlite3.connect(path) as database:
                if fault == "foreign":
                    database.execute("UPDATE stores SET identity = 'another'")
                else:
                    database.execute("UPDATE sessions SET body = x'00' WHERE id = 'old'")
            database.close()
        with caplog.at_level(logging.WARNING, logger="quire.server"):
            store, file = await opened(tmp_path)
        assert "lost" in caplog.text
        assert [each.id for each, _ in store.listed("")] == ["whole"] * (fault == "session")
        store.put(Session("new"), "")
        await file.close()
        assert "new" in await names_after_restart(tmp_path)

    run(work)


def test_a_disk_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        monkeypatch.setattr(kept, "_opened", fails)
        with caplog.at_level(logging.WARNING, logger="quire.server"):
            store, file = await opened(tmp_path)
        assert "disk I/O error" in caplog.text and "not read" in caplog.text
        store.put(Session("a"), "")
        await file.close()
        assert [each.id for each, _ in store.listed("")] == ["a"]

    def fails(*_: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    run(work)


def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later, the last state alone is written."""
    goes_on, read = threading.Event(), kept._opened

    def hangs(path: Path, identity: str) -> Any:
        goes_on.wait(WAIT_S)
        return read(path, identity)

    async def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(kept, "SECONDS_TO_READ", 0.05)
            patch.setattr(kept, "_opened", hangs)
            store, file = await opened(tmp_path)
        assert "not read" in caplog.text
        store.put(Session("a"), "")
        await file.close()
        goes_on.set()
        assert file._reading.wait(WAIT_S)
        store, file = await opened(tmp_path)
        held = threading.Event()
        row = store.row
        monkeypatch.setattr(store, "row", lambda key: (held.wait(WAIT_S), row(key))[1])
        store.put(Session("b"), "")
        with monkeypatch.context() as patch:
            patch.setattr(kept, "SECONDS_TO_WRITE", 0.05)
            await file.written()
        assert "it is slow" in caplog.text
        store.delete("b", "")
        store.put(Session("c"), "")
        held.set()
        assert file._writing.wait(WAIT_S)
        await file.close()
        assert await names_after_restart(tmp_path) == ["c"]

    run(work)


def test_several_fronts_take_sessions_in_once(tmp_path: Path) -> None:
    """Fault: a front that starts later brings back what another one has deleted."""

    async def work() -> None:
        store, file = await opened(tmp_path)
        store.put(Session("a"), "")
        store.put(Session("b"), "")
        await file.close()
        shared = tmp_path / "shared.sqlite"
        stores = [SessionStore(Limits(), shared) for _ in range(3)]
        files = [KeptSessions(store) for store in stores]
        assert await files[0].open(tmp_path / IDENTITY)
        stores[0].delete("a", "")
        assert not await files[1].open(tmp_path / IDENTITY)
        assert [each.id for each, _ in stores[1].listed("")] == ["b"]
        stores[1].put(Session("c"), "")
        assert not await files[2].open(tmp_path / IDENTITY)
        stores[2].delete("c", "")
        for each in files:
            await each.close()
        assert await names_after_restart(tmp_path) == ["b"]

    run(work)


def test_one_front_begins_a_damaged_file_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: each front unlinks it, also the one that another has begun."""
    read, fronts, begun = kept._opened, threading.Barrier(2), threading.Event()

    def reads(path: Path, identity: str) -> Any:
        try:
            found = read(path, identity)
        except sqlite3.DatabaseError:
            with contextlib.suppress(threading.BrokenBarrierError):
                if fronts.wait(1.0):  # another one has seen the damage too
                    begun.wait(WAIT_S)
            raise
        begun.set()
        return found

    async def work() -> None:
        (tmp_path / IDENTITY).mkdir()
        file_of(tmp_path).write_bytes(b"nothing of that kind" * 1000)
        stores = [SessionStore(Limits(), tmp_path / "shared.sqlite") for _ in range(2)]
        files = [KeptSessions(store) for store in stores]
        with monkeypatch.context() as patch:
            patch.setattr(kept, "_opened", reads)
            await asyncio.gather(*(each.open(tmp_path / IDENTITY) for each in files))
        for name, store, file in zip("ab", stores, files, strict=True):
            store.put(Session(name), "")
            await file.close()
        assert await names_after_restart(tmp_path) == ["a", "b"]

    run(work)


def test_sessions_are_taken_in_together_or_not_at_all() -> None:
    """Fault: an error leaves the first ones there, and no other front takes in the others."""
    store = SessionStore(Limits(), None)
    for name in "ab":
        store.put(Session(name), "")
    one, two = (store.row((name, "")) for name in "ab")
    assert one is not None and two is not None
    again = SessionStore(Limits(), None)
    with pytest.raises(sqlite3.IntegrityError):
        again.restore([one, (*two[:2], None, *two[3:])])
    assert again.listed("") == []
    assert again.restore([one, two])
    assert len(again.listed("")) == 2


# --- the whole server -----------------------------------------------------------------------------


def client(url: str, key: str) -> httpx.Client:
    return waiting.PatientClient(base_url=url, headers={"x-api-key": key})


def turn(http: httpx.Client, text: str, session_id: str = "trip", **more: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "session_id": session_id,
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cards(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in http.get("/admin/sessions").json()["sessions"]}


def prefixes(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get("/admin/prefixes").json()["prefixes"]


def num_on_disk(disk: Path, table: str = "sessions") -> int:
    ((files, _),) = KVFolder(disk).stores()
    database = sqlite3.connect(f"file:{files.sessions}?mode=ro", uri=True)
    try:
        return database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    finally:
        database.close()


NUM_SEQS = 16
LONG = "Tell me all about the harbour, its ships and its people, and what the weather is like. "


@pytest.mark.parametrize(
    ("by", "more"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGKILL, ()),
        (signal.SIGKILL, ("--api-server-count", "2")),
        (signal.SIGKILL, ("--data-parallel-size", "2")),
    ],
)
def test_sessions_and_pins_outlive_their_server(
    short_tmp: Path, tmp_path: Path, by: signal.Signals, more: tuple[str, ...]
) -> None:
    disk = tmp_path / "kv"
    flags = ("--api-key", *KEYS, "--max-num-seqs", str(NUM_SEQS), *more)
    num_replicas = 2 if "--data-parallel-size" in more else 1
    with serving(short_tmp, disk, *flags) as server, contextlib.ExitStack() as stack:
        url = ready(server)
        one, two = (stack.enter_context(client(url, key)) for key in KEYS)
        wait_for_replicas(one, num_replicas)
        turn(one, LONG * 3)
        turn(one, "And then?", "deleted")
        turn(two, "Mine alone.")
        assert one.post("/admin/sessions/trip", json={"pinned": True}).status_code == 200
        reply = one.post("/admin/prefixes", json={"prompt": LONG * 2})
        assert reply.status_code == 200, reply.text
        gone = one.post("/admin/prefixes", json={"prompt": LONG + "No."}).json()
        assert one.delete(f"/admin/prefixes/{gone['id']}").status_code == 200
        wait_for(lambda: num_on_disk(disk) == 3, "the sessions on the disk")
        assert one.delete("/admin/sessions/deleted").status_code == 200
        assert num_on_disk(disk) == 2
        session, pinned = cards(one)["trip"], prefixes(one)
        assert len(pinned) == 2
        wait_until_listed(disk, {each["id"] for each in pinned})
        end(server, by=by)
    with serving(short_tmp, disk, *flags) as server, contextlib.ExitStack() as stack:
        url = ready(server)
        one, two = (stack.enter_context(client(url, key)) for key in KEYS)
        wait_for_replicas(one, num_replicas)
        again = cards(one)
        assert list(again) == ["trip"] and list(cards(two)) == ["trip"]
        assert {**again["trip"], "seconds_left": 0} == {**session, "seconds_left": 0}
        assert {each["id"] for each in prefixes(one)} == {each["id"] for each in pinned}
        assert prefixes(two) == []
        found = turn(one, "And the second ship?")
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= session["tokens"] - 1
        assert turn(two, "And mine?")["usage"]["prompt_tokens"] < found["usage"]["prompt_tokens"]
        wait_for(lambda: one.get("/cache").json()["pins"], "pins in the figures of each second")
        reading = one.get("/cache").json()
        assert reading["pins"] and reading["pinned"]
        assert one.delete("/admin/sessions/trip").status_code == 200
        wait_for(lambda: len(prefixes(one)) == 1, "the end of the session's pin")


def ready(server: Serving) -> str:
    """The address, once all fronts serve."""
    wait_for(lambda: "startup complete" in server.text, "all fronts")
    return server.wait_until_ready()


def wait_for_replicas(http: httpx.Client, count: int) -> None:
    """Wait until all are ready: a pin is of those which are ready when it is asked for."""

    def are_ready() -> bool:
        capacity = http.get("/admin/status").json()["capacity"]
        return capacity["max_num_seqs"] == count * NUM_SEQS

    wait_for(are_ready, f"{count} replicas")


def wait_until_listed(disk: Path, keys: set[str]) -> None:
    ((files, header),) = KVFolder(disk).stores()

    def listed() -> set[str]:
        pins = read_pins(files.pins, header.identity)
        return {prefix_key(each.token_ids, each.salt, is_shared=False) for each in pins}

    wait_for(lambda: listed() == keys, "the pins in the list")


def test_a_killed_core_gets_its_pins_back(short_tmp: Path, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with serving(short_tmp, disk) as server, client(server.wait_until_ready(), "") as http:
        http.post("/admin/prefixes", json={"prompt": LONG})
        pinned = prefixes(http)
        wait_until_listed(disk, {each["id"] for each in pinned})
        (core,) = children(server.process.pid)
        os.kill(int(core), signal.SIGKILL)
        wait_for(lambda: http.get("/admin/status").json()["restarts"], "the end of the core")
        wait_for(lambda: http.get("/readyz").status_code == 200, "another core")
        assert prefixes(http) == pinned
