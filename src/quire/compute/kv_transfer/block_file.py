"""The slot file and the header file of a disk tier, as system calls."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["BlockFile", "SystemFile"]

MAX_PIECES = 1024
"""Buffers of one call (IOV_MAX)."""

_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of a call that a file system does not make past the page cache."""


class BlockFile(Protocol):
    """A file that is read and written at places. OSError where that fails, or ends short."""

    def read(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill `pieces` in turn."""
        ...

    def write(self, pieces: Sequence[memoryview], offset: int) -> None: ...

    def cut(self, num_bytes: int) -> None:
        """Drop all bytes behind the first `num_bytes`."""
        ...

    def close(self) -> None: ...


class SystemFile:
    """A file of this system.

    is_direct: past the page cache (O_DIRECT). Some file systems refuse that at the open call, some
    at the first write, and some take only memory at certain addresses. Then it goes on without.
    """

    def __init__(self, path: Path, *, is_writer: bool, is_direct: bool = False) -> None:
        self._path = path
        flags = (os.O_RDWR if is_writer else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        self._files = [os.open(path, flags)]
        self._is_direct = False
        if is_direct:
            with contextlib.suppress(OSError):
                self._files.append(os.open(path, flags | os.O_DIRECT))
                self._is_direct = True

    def read(self, pieces: Sequence[memoryview], offset: int) -> None:
        self._each(os.preadv, pieces, offset)

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        self._each(os.pwritev, pieces, offset)

    def _each(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        pieces: Sequence[memoryview],
        offset: int,
    ) -> None:
        for first in range(0, len(pieces), MAX_PIECES):
            part = pieces[first : first + MAX_PIECES]
            wanted = sum(each.nbytes for each in part)
            done = self._call(call, part, offset)
            if done != wanted:
                raise OSError(f"{self._path}: {done} of {wanted} bytes at {offset}")
            offset += wanted

    def _call(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        part: Sequence[memoryview],
        offset: int,
    ) -> int:
        if self._is_direct:
            try:
                return call(self._files[1], part, offset)
            except OSError as error:
                if error.errno not in _NOT_SO:
                    raise
            self._is_direct = False  # it stays open: another thread may be in a call on it
        return call(self._files[0], part, offset)

    def cut(self, num_bytes: int) -> None:
        os.ftruncate(self._files[0], num_bytes)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
