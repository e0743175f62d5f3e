"""The folder of `kv_disk`: a key, and one store for each model and format of its K/V."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.base.errors import ConfigError
from quire.base.platform.processes import unique_name
from quire.config.kv_disk.records import (
    HEADER_BYTES,
    RECORD,
    Records,
    StoreHeader,
    read_header,
    read_records,
)

__all__ = ["KVFolder", "OpenStore", "StoreFiles", "locked"]

KEY_BYTES = 32

HEADER_SECONDS = 5.0
"""Time that a reader gives another process to write the header of a new store."""


LOCK_TRIES = 5
LOCK_RETRY_S = 0.02
"""Another process that looks if a store is in use has its lock for a moment."""

OWN_FILE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags for a file of a store, which is never a link to one elsewhere."""

STORE_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """The files of one store, in a folder of its own: records and payloads of each rank, and a lock
    that its writer holds."""

    folder: Path

    @property
    def header(self) -> Path:
        return self.header_of(0)

    @property
    def slots(self) -> Path:
        return self.slots_of(0)

    def header_of(self, rank: int) -> Path:
        """Return the path of a rank's records."""
        return self.folder / (f"header.{rank}" if rank else "header")

    def slots_of(self, rank: int) -> Path:
        """Return the path of a rank's payloads."""
        return self.folder / (f"slots.{rank}" if rank else "slots")

    @property
    def pins(self) -> Path:
        """Path of the list of pinned prefixes."""
        return self.folder / "pins"

    @property
    def sessions(self) -> Path:
        """Path of the database of conversations."""
        return self.folder / "sessions.sqlite"

    @property
    def num_bytes(self) -> int:
        """Size of the K/V now: records and payloads."""
        found = (*self.folder.glob("header*"), *self.folder.glob("slots*"))
        return sum(path.stat().st_size for path in found if path.exists())

    def read_records(self, header: StoreHeader) -> Records:
        """Return the records of the first rank, without those that another rank lacks: its write
        may have failed, or its process may have ended before."""
        records = read_records(self.header, header.num_slots)
        for rank in range(1, header.num_ranks):
            others = np.zeros(len(records), RECORD)
            found = read_records(self.header_of(rank), header.num_slots)[: len(records)]
            others[: len(found)] = found
            lacking = (others["name"] != records["name"]) | (others["group"] != records["group"])
            records[lacking | (others["seal"] == 0)] = np.zeros((), RECORD)
        return records

    def lock(self) -> int | None:
        """Take the lock, which ends with the process. Return its descriptor, or None if another
        process writes here. OSError if the folder cannot be written, or has no locks."""
        lock = os.open(self.folder / "lock", OWN_FILE | os.O_CREAT, 0o600)
        try:
            for _ in range(LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    with contextlib.suppress(OSError):  # a full disk
                        os.ftruncate(lock, 0)
                        os.pwrite(lock, unique_name(os.getppid()).encode(), 0)
                    return lock
                time.sleep(LOCK_RETRY_S)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    @property
    def is_locked(self) -> bool:
        """True if a process writes here now."""
        try:
            lock = os.open(self.folder / "lock", OWN_FILE)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(lock)
        return False

    @property
    def is_siblings(self) -> bool:
        """True if the last process that took the lock has the parent of this one. So it is with the
        replicas of a server."""
        with contextlib.suppress(OSError, ValueError):
            return (self.folder / "lock").read_text() == unique_name(os.getppid())
        return False

    @property
    def written_ns(self) -> int:
        """Time at which the header was written last; 0 if there is none."""
        try:
            return self.header.stat().st_mtime_ns
        except OSError:
            return 0

    def read(self) -> StoreHeader | None:
        """Return the header, or None if this version cannot read it."""
        with contextlib.suppress(ConfigError, OSError):
            return read_header(self.header)
        return None

    def remove(self) -> bool:
        """Remove the files. Return whether all have gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store that an engine uses. lock: descriptor of the writer's lock; None for a reader."""

    files: StoreFiles
    header: StoreHeader
    lock: int | None

    @property
    def is_writer(self) -> bool:
        return self.lock is not None

    def close(self) -> None:
        """Let others write."""
        if self.lock is not None:
            os.close(self.lock)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Wait for the lock of a file, which is made if need be, and hold it; where there are no locks,
    go on without."""
    lock: int | None = None
    try:
        with contextlib.suppress(OSError):
            lock = os.open(path, OWN_FILE | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        if lock is not None:
            os.close(lock)


class KVFolder:
    """Stores of several models side by side, which share one limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self) -> bytes:
        """Return the key by which block names are made, a file of mode 0600 that is written by
        whoever comes first. ConfigError if there is none and none can be written."""
        path = self.folder / "key"
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                key = self._read_key(path)
                if len(key) == KEY_BYTES:
                    return key
                raise ConfigError(
                    f"{path} has {len(key)} bytes instead of {KEY_BYTES}. Remove it; what is "
                    "stored beside it is lost then."
                )
            self._write_key(path)
        raise ConfigError(f"{path} cannot be read after it was written. Give another kv_disk.")

    def _read_key(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unusable(error) from error

    def _write_key(self, path: Path) -> None:
        draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another engine was first
                os.link(draft, path)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"kv_disk={str(self.folder)!r} cannot be used ({error.strerror or error}). Give a "
            "folder that this user may read and write."
        )

    def stores(self) -> Iterator[tuple[StoreFiles, StoreHeader]]:
        """The stores that this version can read, the least recently written first."""
        for files in self.all_files():
            header = files.read()
            if header is not None:
                yield files, header

    def all_files(self) -> list[StoreFiles]:
        """Return the files of all stores, those of other versions and damaged ones too, the least
        recently written first."""
        try:
            found = [each for each in os.scandir(self.folder) if STORE_NAME.fullmatch(each.name)]
        except OSError:
            return []
        stores = [StoreFiles(Path(e.path)) for e in found if e.is_dir(follow_symlinks=False)]
        return sorted(stores, key=lambda each: each.written_ns)

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Keep other processes from opening and removing stores meanwhile, where there are
        locks."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            yield

    def open(self, header: StoreHeader) -> OpenStore:
        """Open the store of an identity, and make it if need be. Its limit is what other stores
        leave of `header.max_bytes`; of those that nobody writes, the oldest go until that is half.

        Another process that writes it makes this one a reader. ConfigError if the folder cannot be
        used, or has no room.
        """
        files = StoreFiles(self.folder / header.identity[:32])
        if files.folder.is_symlink():
            raise self._unusable(OSError(f"{files.folder.name} in it is a link"))
        with self.alone():
            store = self._open_to_write(files, header)
        return store or self._open_to_read(files, header)

    def _open_to_write(self, files: StoreFiles, header: StoreHeader) -> OpenStore | None:
        """Open a store as its writer. None if another process is that, or nobody may write."""
        try:
            files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = files.lock()
        except OSError as error:
            if files.read() is None:
                raise self._unusable(error) from error
            return None
        if lock is None:
            return None
        try:
            header = replace(header, max_bytes=self._make_room(files, header.max_bytes))
            if not header.num_slots:
                raise ConfigError(
                    f"kv_disk_bytes leaves {header.max_bytes:,} bytes in {self.folder} beside the "
                    f"stores of other models, too few for a block of {header.block_bytes:,}. Give "
                    "more, or another folder."
                )
            self._prepare(files, header)
        except OSError as error:
            os.close(lock)
            raise self._unusable(error) from error
        except BaseException:
            os.close(lock)
            raise
        return OpenStore(files, header, lock)

    def _open_to_read(self, files: StoreFiles, header: StoreHeader) -> OpenStore:
        found = self._await_header(files)
        if (found.identity, found.slot_bytes) != (header.identity, header.slot_bytes):
            raise ConfigError(f"{files.folder} holds blocks of another model. Remove it.")
        return OpenStore(files, found, None)

    def _await_header(self, files: StoreFiles) -> StoreHeader:
        """Read a header that another process may be writing. ConfigError if it does not come."""
        end = time.monotonic() + HEADER_SECONDS
        while True:
            try:
                return read_header(files.header)
            except PermissionError as error:
                raise self._unusable(error) from error
            except (OSError, ConfigError) as error:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"the store in {files.folder} is written by another process and cannot be "
                        f"read ({error}). Give another kv_disk."
                    ) from error
            time.sleep(0.05)

    def _make_room(self, own: StoreFiles, limit: int) -> int:
        """Return the bytes that a store may have. A store that is written counts with all that it
        may have."""
        sizes = dict[StoreFiles, int]()
        for files in self.all_files():
            if files != own:
                header = files.read() if files.is_locked else None
                sizes[files] = files.num_bytes if header is None else header.max_bytes
        for files in list(sizes):
            if limit - sum(sizes.values()) >= limit // 2:
                break
            if not files.is_locked and files.remove():
                del sizes[files]
        return limit - sum(sizes.values())

    def _prepare(self, files: StoreFiles, header: StoreHeader) -> None:
        """Write the headers that have changed, and cut what lies beyond the limit."""
        for rank in reversed(range(header.num_ranks)):  # readers wait for the first rank's
            self._prepare_rank(files.header_of(rank), files.slots_of(rank), header)

    def _prepare_rank(self, records: Path, slots: Path, header: StoreHeader) -> None:
        known = None
        with contextlib.suppress(ConfigError, OSError):
            known = read_header(records)
        same = known is not None and replace(known, max_bytes=header.max_bytes) == header
        for path, first, each in (
            (records, HEADER_BYTES, RECORD.itemsize),
            (slots, 0, header.slot_bytes),
        ):
            descriptor = os.open(path, OWN_FILE | os.O_CREAT, 0o600)
            try:
                limit = first + each * header.num_slots
                if not same or os.fstat(descriptor).st_size > limit:
                    os.ftruncate(descriptor, limit if same else 0)
                if first and known != header:
                    os.pwrite(descriptor, header.encode(), 0)
            finally:
                os.close(descriptor)
