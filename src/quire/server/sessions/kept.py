"""Keeps conversations in a file beside the K/V on disk, for the next server."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from quire.base.platform.background import Background
from quire.config.kv_disk.folder import StoreFiles, locked
from quire.server.requests.databases import open_database
from quire.server.sessions.store import (
    INSERT_SESSION,
    SESSION_COLUMNS,
    SESSIONS_SCHEMA,
    Session,
    SessionKey,
    SessionStore,
)

__all__ = ["KeptSessions"]

logger = logging.getLogger("quire.server")

SECONDS_TO_READ = 10.0
"""Wait for a disk that may hang. The server begins without its sessions then."""

SECONDS_TO_WRITE = 2.0
"""Wait for a change that is promised to a caller, and for the last ones of a server that ends."""

SECONDS_PER_WARNING = 60.0
POLL_S = 0.005

_SCHEMA = f"{SESSIONS_SCHEMA}\nCREATE TABLE IF NOT EXISTS stores (identity TEXT PRIMARY KEY);"


class KeptSessions:
    """A copy of a `SessionStore` in the store of K/V that its tokens belong to. A thread reads it
    once, then writes what changes, row by row. What several fronts write is what they share.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._files: StoreFiles | None = None
        self._database: sqlite3.Connection | None = None
        self._rows: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._changed: set[SessionKey] = set()
        self._warned_at = -SECONDS_PER_WARNING
        self._reading = Background("quire-sessions-read", self._read)
        self._writing = Background("quire-sessions-write", self._write)

    async def open(self, folder: Path) -> bool:
        """Take in the conversations of an earlier server, and keep those of this one from now on.
        Returns whether it was this front that took them in. What cannot be read is a warning."""
        self._files = StoreFiles(folder)
        self._reading.ask()
        await _until_done(self._reading, SECONDS_TO_READ)
        if self._reading.is_busy or self._database is None:
            logger.warning("the sessions in %s are not read; new ones end with the server", folder)
            return False
        self._store.on_change = self._note
        is_first = self._store.restore(self._rows)
        self._rows = []
        return is_first

    async def written(self) -> None:
        """Wait until all changes are in the file, but no longer than `SECONDS_TO_WRITE`. Those that
        failed are tried again."""
        if self._changed:
            self._writing.ask()
        await _until_done(self._writing, SECONDS_TO_WRITE)
        if self._writing.is_busy:
            self._warn("sessions are not on the disk yet: it is slow")

    async def close(self) -> None:
        """Wait as `written`, and close the file."""
        await self.written()
        if self._database is not None and not self._writing.is_busy:
            self._database.close()
            self._database = None

    def _note(self, key: SessionKey) -> None:
        with self._lock:
            self._changed.add(key)
        self._writing.ask()

    # --- in threads -----------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._files is not None, "it has been opened"
        path, identity = self._files.sessions, self._files.folder.name
        try:
            with locked(path.with_suffix(".lock")):  # what one front begins anew, no other unlinks
                try:
                    self._database, rows = _opened(path, identity)
                except sqlite3.OperationalError:  # the disk fails, or another process writes
                    raise
                except sqlite3.DatabaseError as error:
                    logger.warning("the sessions in %s are lost, and begin anew: %s", path, error)
                    path.unlink()
                    self._database, rows = _opened(path, identity)
            self._rows = list(self._readable(rows))
        except (OSError, sqlite3.Error) as error:
            self._warn(f"the sessions in {path} cannot be read: {error}")

    def _readable(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        for row in rows:
            try:
                msgspec.msgpack.decode(row[-1], type=Session)
            except (msgspec.MsgspecError, TypeError) as error:
                self._warn(f"a session on the disk is damaged and lost: {error}")
                continue
            yield row

    def _write(self) -> None:
        """Write what has changed. Fronts write one after the other, each what the store has when
        its turn comes, so that the last one is right."""
        database = self._database
        with self._lock:
            changed, self._changed = self._changed, set()
        if database is None:
            return
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                for key in changed:
                    row = self._store.row(key)
                    if row is None:
                        database.execute("DELETE FROM sessions WHERE id = ? AND tenant = ?", key)
                    else:
                        database.execute(INSERT_SESSION, row)
                database.execute("DELETE FROM sessions WHERE expires_s <= ?", (time.time(),))
        except sqlite3.Error as error:
            with self._lock:
                self._changed |= changed
            self._warn(f"sessions are not kept on the disk: {error}")

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned_at >= SECONDS_PER_WARNING:
            self._warned_at = now
            logger.warning("%s", text)


async def _until_done(work: Background, seconds: float) -> None:
    end = time.monotonic() + seconds
    while work.is_busy and time.monotonic() < end:
        await asyncio.sleep(POLL_S)


def _opened(path: Path, identity: str) -> tuple[sqlite3.Connection, list[tuple[Any, ...]]]:
    """Open the file of a store, and read its rows. sqlite3.DatabaseError if it is damaged, or of
    another store."""
    database = open_database(path, _SCHEMA, is_lasting=True, journal="TRUNCATE")
    try:
        database.execute("PRAGMA secure_delete = ON")  # what a caller deletes is gone
        database.execute("INSERT OR IGNORE INTO stores VALUES (?)", (identity,))
        if database.execute("SELECT count(*) FROM stores").fetchone()[0] != 1:
            raise sqlite3.DatabaseError("they belong to another store")
        database.execute("DELETE FROM sessions WHERE expires_s <= ?", (time.time(),))
        return database, database.execute(f"SELECT {SESSION_COLUMNS} FROM sessions").fetchall()
    except BaseException:
        database.close()
        raise
