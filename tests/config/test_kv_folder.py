"""Stores of several models in one folder: one limit, one writer each, and a key."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.base.platform.processes import unique_name
from quire.config.kv_disk.check import clear
from quire.config.kv_disk.digest import digest_files
from quire.config.kv_disk.folder import KVFolder, OpenStore
from quire.config.kv_disk.pins import read_pins, write_pins
from quire.config.kv_disk.records import RECORD, StoreHeader
from quire.protocol.pins import KeptPin
from tests.waiting import WAIT_S

LIMIT = 10_000_000


def header(model: str, max_bytes: int = LIMIT) -> StoreHeader:
    return StoreHeader(model.encode().hex().ljust(64, "0"), model, 5000, 8192, max_bytes)


def fill(store: OpenStore, num_slots: int, time_s: int = 0) -> None:
    """Give the files the size that so many blocks have."""
    with store.files.slots.open("r+b") as file:
        file.truncate(num_slots * store.header.slot_bytes)
    if time_s:
        os.utime(store.files.header, (time_s, time_s))


def names(folder: KVFolder) -> list[str]:
    return [each.model for _, each in folder.stores()]


def test_slots_and_records_fit_into_the_limit() -> None:
    for limit in (2**20, 2**20 + 1, LIMIT):
        each = header("a", limit)
        size = 4096 + each.num_slots * (each.slot_bytes + RECORD.itemsize)
        assert size <= limit < size + each.slot_bytes + RECORD.itemsize


def test_one_writes_and_others_read(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path / "kv")
    first, second = folder.open(header("a")), folder.open(header("a", LIMIT // 2))
    assert first.is_writer and not second.is_writer
    assert second.header == first.header, "a reader has other slots than the writer"
    first.close()
    assert folder.open(header("a")).is_writer


def test_replicas_are_told_from_other_servers(tmp_path: Path) -> None:
    """Fault: a reader cannot know if its own server writes, and keeps the sessions of another."""
    writer = KVFolder(tmp_path).open(header("a"))
    assert writer.files.is_siblings
    lock = writer.files.folder / "lock"
    own = lock.read_text()
    for other in (
        unique_name(os.getpid()),
        own.rpartition("/")[0] + "/1",  # of a container in which its parent has the same pid
        "another-boot" + own[own.index("/") :],
        "",
    ):
        lock.write_text(other)
        assert not writer.files.is_siblings, other
    writer.close()
    again = KVFolder(tmp_path).open(header("a"))
    assert again.is_writer and again.files.is_siblings
    again.close()


def test_a_reader_waits_for_a_header_that_is_being_made(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path / "kv")
    writer = folder.open(header("a"))
    data = writer.files.header.read_bytes()
    writer.files.header.write_bytes(b"")
    opened: list[OpenStore] = []
    reader = threading.Thread(target=lambda: opened.append(folder.open(header("a"))))
    reader.start()
    writer.files.header.write_bytes(data)
    reader.join(WAIT_S)
    assert [each.header for each in opened] == [writer.header]


def test_stores_share_the_limit(tmp_path: Path) -> None:
    """The one that was written longest ago goes when the others leave less than half."""
    folder = KVFolder(tmp_path)
    for time_s, model in ((300, "new"), (100, "old"), (200, "middle")):
        store = folder.open(header(model))
        fill(store, 300, time_s)
        store.close()
    assert names(folder) == ["old", "middle", "new"]
    store = folder.open(header("own"))
    assert set(names(folder)) == {"middle", "new", "own"}
    sizes = sum(files.num_bytes for files, each in folder.stores() if each.model != "own")
    assert sizes + store.header.max_bytes <= LIMIT
    assert store.header.max_bytes >= LIMIT // 2


def test_a_store_in_use_counts_with_all_that_it_may_have(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path)
    first = folder.open(header("a", LIMIT // 4))
    second = folder.open(header("b"))
    assert second.header.max_bytes == LIMIT - first.header.max_bytes
    with pytest.raises(ConfigError, match="too few for a block"):
        folder.open(header("c"))
    assert set(names(folder)) >= {"a", "b"}


def test_files_of_another_form_are_begun_anew(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path)
    store = folder.open(header("a"))
    fill(store, 20)
    store.close()
    store = folder.open(replace(header("a"), slot_bytes=12288))
    assert store.files.slots.stat().st_size == 0
    store.close()


def test_engines_that_start_together_share_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room = KVFolder._make_room

    def slow(*given: Any) -> int:
        found = make_room(*given)
        time.sleep(0.2)  # in which others would see the same room
        return found

    monkeypatch.setattr(KVFolder, "_make_room", slow)
    opened: list[OpenStore] = []
    models = [f"model {number}" for number in range(4)]

    def start(model: str) -> None:
        with contextlib.suppress(ConfigError):  # the others left it too little
            opened.append(KVFolder(tmp_path).open(header(model, LIMIT)))

    threads = [threading.Thread(target=start, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sum(each.header.max_bytes for each in opened) <= LIMIT
    for each in opened:
        each.close()


def test_a_look_at_a_store_does_not_keep_its_writer_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = KVFolder(tmp_path)
    store = folder.open(header("a"))
    store.close()
    looking = os.open(store.files.folder / "lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    assert folder.open(header("a")).is_writer
    os.close(looking)


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one that another process writes."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ConfigError, match="No locks available"):
        KVFolder(tmp_path).open(header("a"))


def test_stores_of_other_versions_count_and_go(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path)
    for model in ("a", "b"):
        store = folder.open(replace(header(model), format=999))
        fill(store, 600)
        store.close()
    assert names(folder) == []
    store = folder.open(header("own"))
    sizes = sum(files.num_bytes for files in folder.all_files() if files != store.files)
    assert sizes + store.header.max_bytes <= LIMIT
    assert sizes <= LIMIT // 2
    store.close()
    assert clear(folder) > sizes
    assert folder.all_files() == []


@pytest.mark.parametrize("name", ["header", "slots", "lock", ""])
def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    store = KVFolder(tmp_path / "kv").open(header("a"))
    store.close()
    path = store.files.folder / name
    path.rename(other)
    path.symlink_to(other)
    before = other.read_bytes() if name else b""
    if name in ("slots", "lock"):
        store.files.header.unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        KVFolder(tmp_path / "kv").open(header("a", LIMIT // 2))
    assert not name or other.read_bytes() == before


def test_there_is_one_key(tmp_path: Path) -> None:
    folder = KVFolder(tmp_path / "new" / "kv")
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(folder.key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(keys) == 8 and set(keys) == {folder.key()}
    assert [path.name for path in folder.folder.iterdir()] == ["key"]
    (folder.folder / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes instead of 32"):
        folder.key()


def test_digests_follow_contents(tmp_path: Path) -> None:
    memory, path = tmp_path / "memory.json", tmp_path / "weights"
    path.write_bytes(b"one")
    first = digest_files([path], memory)
    assert digest_files([path], memory) == first
    moved = path.rename(tmp_path / "moved")
    assert digest_files([moved], memory) == first
    moved.write_bytes(b"two")
    assert digest_files([moved], memory) != first
    memory.write_text("{")
    moved.write_bytes(b"one")
    assert digest_files([moved], memory) == first


PINS = [
    KeptPin("one", "", "", np.arange(40, dtype=np.int32), None),
    KeptPin("session-a", "key", "key\0salt", np.array([7], np.int32), 1e10),
]


def test_a_list_of_pins_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pins"
    assert read_pins(path, "a") == []
    write_pins(path, "a", PINS)
    ended = KeptPin("ended", "", "", np.array([7], np.int32), 1.0)
    write_pins(path, "a", [ended, *PINS[::-1]])
    found = read_pins(path, "a")
    assert [each.name for each in found] == ["session-a", "one"]
    for old, new in zip(PINS[::-1], found, strict=True):
        assert new.token_ids.dtype == np.int32
        assert new.token_ids.tolist() == old.token_ids.tolist()
        assert (new.tenant, new.salt, new.expires_s) == (old.tenant, old.salt, old.expires_s)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["pins"]


def test_a_list_of_pins_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "pins"
    write_pins(path, "a", PINS)
    data = path.read_bytes()
    with pytest.raises(ConfigError, match="another store"):
        read_pins(path, "b")
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ConfigError):
            read_pins(path, "a")
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ConfigError):
            read_pins(path, "a")


def test_a_list_of_pins_is_no_link_to_another_file(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "pins"
    other.write_bytes(b"mine")
    path.with_name("pins.draft").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        write_pins(path, "a", PINS)
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        read_pins(path, "a")
    assert other.read_bytes() == b"mine"
