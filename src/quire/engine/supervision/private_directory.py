"""The private directory in which an engine core and its clients meet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from quire.base.errors import ConfigError

__all__ = ["private_directory"]

PREFIX = "quire-engine-"
OWNER_LOCK = "owner"

MAX_SOCKET_PATH = 100
"""A Unix socket's path has at most 108 bytes on Linux and 104 on macOS, with the final zero."""


@contextlib.contextmanager
def private_directory() -> Generator[Path]:
    """A new directory that only this user can enter, removed with all that is in it at the end.

    What killed processes could not remove is removed by the next one that comes here. Raises
    ConfigError if the path would be too long for sockets in it.
    """
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    itself = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    unlocked = directory / "unlocked"  # nobody sweeps a directory without OWNER_LOCK
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(itself, fcntl.LOCK_EX)  # systemd-tmpfiles takes no old files out of it then
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(directory / OWNER_LOCK)
        if len(os.fsencode(directory)) > MAX_SOCKET_PATH - len("/heartbeat"):
            raise ConfigError(
                f"The temporary directory {str(directory)!r} has a path too long for sockets. "
                "Set TMPDIR to a shorter one, such as /tmp."
            )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
        os.close(itself)


def _sweep(parent: Path) -> None:
    """Remove directories of this user whose owner is gone: its lock is free."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / OWNER_LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
