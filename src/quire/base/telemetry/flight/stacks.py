"""Stacks of all threads of a server's processes, also of those that hang.

Each process has a file into which the C library's handler of SIGUSR1 writes them, even while some
code holds the interpreter. A lock on the file tells whether its process lives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = [
    "ProcessStacks",
    "StackFile",
    "StackPlace",
    "forget_stacks",
    "gather_stacks",
    "own_stacks",
]

PREFIX = "stacks-"
PATIENCE_S = 0.5
"""Time that a process has to write its stacks."""

LOOK_S = 0.02
MAX_FILE_BYTES = 2**20
_FATAL = "Fatal Python error"


class ProcessStacks(msgspec.Struct, frozen=True):
    """name: role of the process, as "core" or "rank 1". text: its stacks, or why there are
    none."""

    name: str
    pid: int
    text: str


class StackPlace(NamedTuple):
    """directory: folder of the files of one server. owner: word for the process that starts and
    ends the others whose files have it too, such as "core3"."""

    directory: str
    owner: str


class StackFile:
    """The file of this process. From now on SIGUSR1 writes the stacks of all threads there, and so
    does a fatal error."""

    def __init__(self, place: StackPlace, name: str) -> None:
        """name: role of this process."""
        path = Path(place.directory) / f"{PREFIX}{place.owner}-{name.replace(' ', '_')}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._descriptor = os.open(path, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        faulthandler.enable(self._descriptor)
        faulthandler.register(signal.SIGUSR1, self._descriptor, all_threads=True)
        os.write(self._descriptor, _head(os.getpid()))  # last: a reader sends the signal


def forget_stacks(place: StackPlace) -> None:
    """Remove the files of an owner that has ended."""
    for path in Path(place.directory).glob(f"{PREFIX}{place.owner}-*"):
        path.unlink(missing_ok=True)


def own_stacks(name: str) -> ProcessStacks:
    """Return the stacks of this process, with the names of its threads."""
    names = {each.ident: each.name for each in threading.enumerate()}
    parts: list[str] = []
    frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for ident, frame in frames.items():
        lines = traceback.format_stack(frame)
        parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(lines)}")
    return ProcessStacks(name, os.getpid(), "\n".join(parts))


@dataclass(slots=True)
class _Asked:
    """A file whose process is writing into it."""

    name: str
    pid: int
    descriptor: int
    start: int
    size: int


def gather_stacks(
    directories: Iterable[Path], patience_s: float = PATIENCE_S
) -> list[ProcessStacks]:
    """Have all other processes with files here write their stacks, and return these. Of a process
    that has ended, return what a fatal error left; nothing if there is nothing."""
    found: list[ProcessStacks] = []
    asked: list[_Asked] = []
    for directory in directories:
        for path in sorted(directory.glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError, ValueError):
                _ask(path, asked, found)
    end = time.monotonic() + patience_s
    waiting: Sequence[_Asked] = asked
    while waiting and time.monotonic() < end:
        time.sleep(LOOK_S)
        waiting = [each for each in asked if not _is_done(each)]
    for each in asked:
        text = _read(each.descriptor, each.start)
        why = (
            "it has ended"
            if _is_free(each.descriptor)
            else f"it wrote none within {patience_s:g} s"
        )
        os.close(each.descriptor)
        found.append(ProcessStacks(each.name, each.pid, text or why))
    return found


def _ask(path: Path, asked: list[_Asked], found: list[ProcessStacks]) -> None:
    """Send the signal to the owner of a file, if it lives. Raises OSError, and ValueError for a
    file that has no number yet."""
    name = path.name.removeprefix(PREFIX).partition("-")[2].replace("_", " ")
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        pid = int(os.pread(descriptor, 64, 0).partition(b"\n")[0])
        if pid == os.getpid():
            os.close(descriptor)
            return
        if _is_free(descriptor):
            text = _read(descriptor, 0)
            if (at := text.rfind(_FATAL)) >= 0:
                found.append(ProcessStacks(name, pid, text[at:]))
            os.close(descriptor)
            return
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            os.ftruncate(descriptor, len(_head(pid)))
        start = os.fstat(descriptor).st_size
        os.kill(pid, signal.SIGUSR1)
    except BaseException:
        os.close(descriptor)
        raise
    asked.append(_Asked(name, pid, descriptor, start, start))


def _is_free(descriptor: int) -> bool:
    """Return whether the process that locked the file has ended."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(asked: _Asked) -> bool:
    """Return whether the file has grown, and has its size since the last look, or nobody will
    write any more."""
    is_free = _is_free(asked.descriptor)
    was, asked.size = asked.size, os.fstat(asked.descriptor).st_size
    return is_free or (asked.size > asked.start and asked.size == was)


def _read(descriptor: int, start: int) -> str:
    length = min(os.fstat(descriptor).st_size - start, MAX_FILE_BYTES)
    return os.pread(descriptor, max(length, 0), start).decode(errors="replace").strip()


def _head(pid: int) -> bytes:
    return b"%d\n" % pid
