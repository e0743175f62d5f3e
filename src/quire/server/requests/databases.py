"""Databases that several fronts open at once."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

__all__ = ["open_database", "private"]

BUSY_S = 5.0
"""Longest wait, in seconds, for another front that writes."""
OPEN_S = 30.0
"""Longest wait, in seconds, for fronts that open the same new file."""
_OPEN_TRIES = 50
_OPEN_PAUSE_S = 0.02


def private(path: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file for this user alone, whatever the umask, also one that is there. The opener of
    `open`."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def open_database(
    path: Path | None, schema: str, *, is_lasting: bool, journal: str = "WAL"
) -> sqlite3.Connection:
    """Open a database, and create missing tables. path: file that fronts share; None for memory.
    is_lasting: it must survive a crash of the machine. journal: mode of SQLite's journal; WAL needs
    a disk of this machine. Raises sqlite3.Error if the file is no database.

    Fronts that start together write to a new file at once. SQLite does not wait for a change of the
    journal's mode, so this is tried again: within `OPEN_S` while the file is locked, as a slow disk
    may have it, and for a second after other errors.
    """
    if path is not None:  # what SQLite puts beside it gets its mode
        os.close(private(path))
    database = sqlite3.connect(
        ":memory:" if path is None else path,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    if not is_lasting:
        database.execute("PRAGMA synchronous = OFF")
    num_left, until = _OPEN_TRIES, time.monotonic() + OPEN_S
    while True:
        try:
            database.execute(f"PRAGMA journal_mode = {journal}")
            database.executescript(schema)
        except sqlite3.OperationalError as error:
            is_locked = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            num_left -= not is_locked
            if not num_left or time.monotonic() > until:
                database.close()
                raise
            time.sleep(_OPEN_PAUSE_S)
        except sqlite3.Error:
            database.close()
            raise
        else:
            return database
