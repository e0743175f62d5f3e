"""Clients' files, and batches over them, in a folder of the operator's.

Contents are files of their own; their facts are in SQLite, which survives the server. All fronts
share the folder. Each caller's key sees its own alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from quire.base.errors import ConfigError
from quire.server.requests.databases import open_database, private
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits

__all__ = [
    "BATCH_PURPOSE",
    "UNFINISHED",
    "BatchRequestCounts",
    "BatchStore",
    "KeptBatch",
    "KeptFile",
    "NewFile",
]

logger = logging.getLogger("quire.server")

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, num_bytes INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, weight REAL NOT NULL, status TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
"""
BATCH_PURPOSE = "batch"
"""Purpose of a file with a request in each line."""
NUM_SHARING = 2
"""Share of each bound that one of several keys may use."""
WINDOW_S = 86_400
"""Deadline of a batch from its arrival: `completion_window` "24h", the only one."""
_PARTIAL = ".partial"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_LEFT_BEHIND_S = 3600.0
"""Age from which on nobody writes an upload any more."""


class KeptFile(msgspec.Struct, kw_only=True):
    """A file, in the form that clients see."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class BatchRequestCounts(msgspec.Struct):
    """Lines of a batch: all, those with a good answer, and those without."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class KeptBatch(msgspec.Struct, kw_only=True):
    """A batch, in the form that clients see; times in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchRequestCounts = msgspec.field(default_factory=BatchRequestCounts)
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    object: str = "batch"

    @property
    def is_unfinished(self) -> bool:
        return self.status in UNFINISHED


class NewFile:
    """Contents that are being written. Threads may write them, one after the other."""

    def __init__(self, store: BatchStore, partial: Path, file_id: str, tenant: str) -> None:
        """partial: the file that is written, which `keep` gives its place in the store."""
        self._store = store
        self._contents: IO[bytes] | None = None
        self._partial = partial
        self._file_id = file_id
        self.tenant = tenant
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append to the contents. RefusedError if there is no room for them."""
        self.num_bytes += len(data)
        self._store.check_room(self.num_bytes, self.tenant, self)
        self._opened().write(data)

    def keep(self, filename: str, purpose: str) -> KeptFile:
        """Keep what was written. RefusedError if there is no room for it."""
        self._opened().flush()
        self._store.check_room(self.num_bytes, self.tenant, self)
        return self._store.adopt(self._partial, self._file_id, filename, purpose, self.tenant)

    def _opened(self) -> IO[bytes]:
        if self._contents is None:
            self._contents = os.fdopen(private(self._partial, _NEW), "wb")
        return self._contents

    def close(self) -> None:
        """Write no more. May be called twice."""
        contents, self._contents = self._contents, None
        if contents is not None:
            contents.close()


class BatchStore:
    """The store of one process; others may have the same folder open."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        tenants: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """folder: created if missing. tenants: names of the callers' keys; a single one takes over
        what was kept without a name. Raises ConfigError if the folder cannot be made or its
        database is not one."""
        self._limits = limits
        self._num_sharing = NUM_SHARING if len(tenants) > 1 else 1
        self._clock = clock
        self._contents = folder / "files"
        self._writing: set[NewFile] = set()
        self._has_lost = False  # files whose rows could not be deleted
        try:
            if not folder.exists():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
            self._contents.mkdir(exist_ok=True)
            self._contents.chmod(0o700)
            self._clear_left_behind()
            for path in self._contents.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another front clears too
                    path.chmod(0o600)
            self._lock = private(folder / "running")
            self._database = open_database(folder / "batches.sqlite", _SCHEMA, is_lasting=True)
            self._forget_lost()
            if len(tenants) == 1:
                self._adopt_nameless(tenants[0])
            self._tell_of_strangers(folder, tuple(tenants) or ("",))
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"data_dir is {str(folder)!r}, which cannot be used ({error}). Give a folder that "
                "the server may write to."
            ) from error

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    def claim(self) -> bool:
        """Return True if this process is the one that runs the batches of the folder. It is from
        the first such call that finds no other one, be it a front or another server, until the
        store is closed or the process ends."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _clear_left_behind(self) -> None:
        """Delete uploads that a killed server has left. Another front may be writing newer ones."""
        for path in self._contents.glob(f"file-*{_PARTIAL}"):
            with contextlib.suppress(FileNotFoundError):  # another front clears too
                if path.stat().st_mtime < self._clock() - _LEFT_BEHIND_S:
                    path.unlink()

    def _adopt_nameless(self, tenant: str) -> None:
        """Give files and batches that were kept without a key to the only key. A second key, added
        later, would otherwise hide them."""
        for table in ("files", "batches"):
            self._database.execute(f"UPDATE {table} SET tenant = ? WHERE tenant = ''", (tenant,))

    def _tell_of_strangers(self, folder: Path, tenants: tuple[str, ...]) -> None:
        """Warn about files of other keys: they count against the bounds, and nobody can delete
        them."""
        marks = ", ".join("?" * len(tenants))
        count, _ = self._files(f" WHERE tenant NOT IN ({marks})", tenants)
        if count:
            logger.warning(
                "%s has %d files of API keys that this server does not have: start it with these "
                "keys too, to read or delete them",
                folder,
                count,
            )

    @property
    def num_files(self) -> int:
        return self._files()[0]

    @property
    def num_file_bytes(self) -> int:
        return self._files()[1]

    @property
    def num_open_batches(self) -> int:
        return len(list(self._unfinished()))

    def _files(self, where: str = "", given: tuple[str, ...] = ()) -> tuple[int, int]:
        """Return number and bytes of the files of all callers, or of some."""
        return self._database.execute(
            f"SELECT count(*), ifnull(sum(num_bytes), 0) FROM files{where}", given
        ).fetchone()

    # --- files ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def new_file(self, tenant: str) -> Generator[NewFile]:
        """Begin a file whose contents come piece by piece; without `NewFile.keep` nothing is left
        of it. RefusedError if there is no room for it."""
        self.check_room(0, tenant)
        file_id = f"file-{secrets.token_hex(12)}"
        partial = self.path(file_id).with_suffix(_PARTIAL)
        new = NewFile(self, partial, file_id, tenant)
        self._writing.add(new)
        try:
            yield new
        finally:
            self._writing.discard(new)
            with contextlib.suppress(OSError):  # what the buffer holds meets a full disk again
                new.close()
            partial.unlink(missing_ok=True)

    def add_file(self, filename: str, purpose: str, data: bytes, tenant: str) -> KeptFile:
        """Keep a file. RefusedError if there is no room for it."""
        with self.new_file(tenant) as new:
            new.write(data)
            return new.keep(filename, purpose)

    def adopt(
        self, written: Path, file_id: str, filename: str, purpose: str, tenant: str
    ) -> KeptFile:
        """Keep a file that is already written under this id, or replace the one with this id."""
        kept = KeptFile(
            id=file_id,
            bytes=written.stat().st_size,
            created_at=int(self._clock()),
            filename=filename[:255],
            purpose=purpose,
        )
        written.replace(self.path(file_id))
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                (file_id, tenant, kept.bytes, msgspec.json.encode(kept)),
            )
        except sqlite3.Error:
            self.path(file_id).replace(written)
            raise
        return kept

    def path(self, file_id: str) -> Path:
        """Return the path of a file's contents. file_id: id of a file found or made here."""
        return self._contents / file_id

    def find_file(self, file_id: str, tenant: str) -> KeptFile:
        """Return a file. Raises RefusedError 404 if there is none."""
        row = self._database.execute(
            "SELECT body FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)
        ).fetchone()
        if row is None or not self.path(file_id).exists():
            raise _missing("file", file_id)
        return msgspec.json.decode(row[0], type=KeptFile)

    def list_files(self, tenant: str) -> list[KeptFile]:
        """Return the caller's files, newest first."""
        rows = self._database.execute(
            "SELECT body FROM files WHERE tenant = ? ORDER BY rowid DESC", (tenant,)
        )
        found = [msgspec.json.decode(body, type=KeptFile) for (body,) in rows]
        there = set(os.listdir(self._contents))
        return [each for each in found if each.id in there]

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises RefusedError 404 if there is none, 400 if a batch still reads
        it."""
        self.find_file(file_id, tenant)
        for batch, _, _ in self._unfinished():
            if batch.input_file_id == file_id:
                raise RefusedError(
                    f"The batch {batch.id} still reads the file. Cancel it first, or wait."
                )
        # The contents first: a full disk has no room for the database to note anything, and what
        # has no contents is gone.
        self.path(file_id).unlink(missing_ok=True)
        try:
            self._forget((file_id,))
        except sqlite3.OperationalError as error:
            logger.warning("the file %s is deleted, and noted as such later: %s", file_id, error)
            self._has_lost = True
            with contextlib.suppress(sqlite3.OperationalError):  # its log may take what is free
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _forget(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def _forget_lost(self) -> None:
        """Forget files whose contents are gone."""
        ids = [file_id for (file_id,) in self._database.execute("SELECT id FROM files")]
        # After the rows: contents come before rows, also those that another front keeps just now.
        there = set(os.listdir(self._contents))
        self._forget(file_id for file_id in ids if file_id not in there)
        self._has_lost = False

    def has_room(self, num_bytes: int, tenant: str) -> bool:
        """Return True if a caller may keep this many bytes more."""
        return all(size + num_bytes <= most for _, _, _, size, most in self._totals(tenant))

    def _totals(
        self, tenant: str, besides: NewFile | None = None
    ) -> Iterator[tuple[str, int, int, int, int]]:
        """Yield (owner, number, its bound, bytes, their bound) for the files of all callers, and
        for those of one. Files that this process is writing count, except `besides`."""
        limits = self._limits
        writing = [each for each in tuple(self._writing) if each is not besides]
        own = [each for each in writing if each.tenant == tenant]
        for whose, where, given, part, others in (
            ("The server", "", (), 1, writing),
            ("This key", " WHERE tenant = ?", (tenant,), self._num_sharing, own),
        ):
            count, size = self._files(where, given)
            count, size = count + len(others), size + sum(each.num_bytes for each in others)
            most = limits.max_kept_files, limits.max_kept_file_bytes
            yield whose, count, max(1, most[0] // part), size, max(1, most[1] // part)

    def check_room(self, num_bytes: int, tenant: str, new: NewFile | None = None) -> None:
        """RefusedError if a caller may not keep a file of so many bytes more. new: this file, if
        it has begun."""
        if self._has_lost:
            with contextlib.suppress(sqlite3.OperationalError):  # still no room to note it
                self._forget_lost()
        for whose, count, most, size, most_bytes in self._totals(tenant, new):
            if count >= most or size + num_bytes > most_bytes:
                raise RefusedError(
                    f"{whose} keeps {count} files of {size} bytes, and may keep {most} of "
                    f"{most_bytes} (max_kept_files, max_kept_file_bytes). Delete some."
                )

    # --- batches --------------------------------------------------------------------------------

    def add_batch(
        self,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        tenant: str,
        weight: float,
    ) -> KeptBatch:
        """Queue a batch. Raises RefusedError if the file does not exist or is none of a batch, or
        too many batches wait."""
        purpose = self.find_file(input_file_id, tenant).purpose
        if purpose != BATCH_PURPOSE:
            raise RefusedError(
                f"The file {input_file_id} has the purpose {purpose!r}. Upload one with a request "
                f"in each line and the purpose {BATCH_PURPOSE!r}.",
                param="input_file_id",
            )
        most = self._limits.max_open_batches
        owners = [owner for _, owner, _ in self._unfinished()]
        for whose, count, bound in (
            ("", len(owners), most),
            (" of this key", owners.count(tenant), max(1, most // self._num_sharing)),
        ):
            if count >= bound:
                raise RefusedError(
                    f"{bound} batches{whose} wait already (max_open_batches). Try again when one "
                    "has ended.",
                    status=503,
                    retry_after_s=60,
                )
        now = int(self._clock())
        batch = KeptBatch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=metadata,
        )
        self._database.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
            (batch.id, tenant, weight, batch.status, msgspec.json.encode(batch)),
        )
        return batch

    def find_batch(self, batch_id: str, tenant: str) -> KeptBatch:
        """Return a batch. Raises RefusedError 404 if there is none."""
        row = self._database.execute(
            "SELECT body FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)
        ).fetchone()
        if row is None:
            raise _missing("batch", batch_id)
        return msgspec.json.decode(row[0], type=KeptBatch)

    def list_batches(self, tenant: str) -> list[KeptBatch]:
        """Return the caller's batches, newest first."""
        rows = self._database.execute(
            "SELECT body FROM batches WHERE tenant = ? ORDER BY rowid DESC", (tenant,)
        )
        return [msgspec.json.decode(body, type=KeptBatch) for (body,) in rows]

    def cancel_batch(self, batch_id: str, tenant: str) -> KeptBatch:
        """Ask for the end of a batch. Raises RefusedError 404 if there is none, 400 if it has
        ended."""
        while True:
            batch = self.find_batch(batch_id, tenant)
            if not batch.is_unfinished:
                raise RefusedError(
                    f"The batch {batch_id} is {batch.status}: it cannot be cancelled."
                )
            was = batch.status
            if was == "cancelling":
                return batch
            batch.status, batch.cancelling_at = "cancelling", int(self._clock())
            if self.note_progress(batch, was):  # otherwise its status has changed meanwhile
                return batch

    def end_batch(self, batch: KeptBatch, ending: str) -> None:
        """Record how a batch ended. A batch that was being cancelled is cancelled, with the answers
        so far."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            kept = self._database.execute(
                "SELECT body FROM batches WHERE id = ?", (batch.id,)
            ).fetchone()
            asked_at = msgspec.json.decode(kept[0], type=KeptBatch).cancelling_at
            batch.status = ending if asked_at is None or ending == "failed" else "cancelled"
            batch.cancelling_at = asked_at
            setattr(batch, f"{batch.status}_at", int(self._clock()))
            self._database.execute(
                "UPDATE batches SET status = ?, body = ? WHERE id = ?",
                (batch.status, msgspec.json.encode(batch), batch.id),
            )

    def note_progress(self, batch: KeptBatch, was: str) -> bool:
        """Record the progress of a batch that had the status `was`. Returns False, and changes
        nothing, if it has another status by now: it was cancelled."""
        row = self._database.execute(
            "UPDATE batches SET status = ?, body = ? WHERE id = ? AND status = ? RETURNING id",
            (batch.status, msgspec.json.encode(batch), batch.id, was),
        ).fetchone()
        return row is not None

    def next_batch(self) -> tuple[KeptBatch, str, float] | None:
        """Return the oldest unfinished batch, with its caller's tenant and weight."""
        return next(self._unfinished(), None)

    def _unfinished(self) -> Iterator[tuple[KeptBatch, str, float]]:
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._database.execute(
            f"SELECT body, tenant, weight FROM batches WHERE status IN ({marks}) ORDER BY rowid",
            UNFINISHED,
        ).fetchall()
        for body, tenant, weight in rows:
            yield msgspec.json.decode(body, type=KeptBatch), tenant, weight


def _missing(kind: str, name: str) -> RefusedError:
    return RefusedError(
        f"There is no {kind} {name[:80]!r}. It was made by another key, or is deleted.",
        status=404,
        param=f"{kind}_id",
    )
