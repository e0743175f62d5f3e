"""A dump: rings and stacks of one moment in one file, and the folder of the last ones."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

import quire
from quire.base.errors import ConfigError
from quire.base.telemetry.flight.record import RING_PREFIX
from quire.base.telemetry.flight.stacks import ProcessStacks, gather_stacks, own_stacks

__all__ = [
    "DumpFolder",
    "FaultDumps",
    "FlightDump",
    "collect",
    "decode_dump",
    "encode_dump",
    "user_folder",
]

logger = logging.getLogger("quire")

MAGIC = b"QUIREFLT"
_DIGEST_BYTES = 16
_HEAD_BYTES = len(MAGIC) + 8 + _DIGEST_BYTES
MAX_DUMP_BYTES = 256 * 2**20
"""Bound on the size of an unpacked dump, against files that were made to fill the memory."""

NUM_KEPT = 16
BETWEEN_FAULTS_S = 10.0
"""Time after a dump of a fault in which this process writes no other one."""


class FlightDump(msgspec.Struct, frozen=True):
    """reason: cause of the dump. quire: version. wall_ns, mono_ns: time of the dump, in
    nanoseconds since 1970 and on the clock of the rings. rings: copies of the rings of all cores.
    stacks: stacks of all processes."""

    reason: str
    quire: str
    wall_ns: int
    mono_ns: int
    rings: list[bytes]
    stacks: list[ProcessStacks]


def collect(
    reason: str, process: str, directories: Sequence[Path] = (), rings: Iterable[bytes] = ()
) -> FlightDump:
    """Return a dump of this moment. It takes up to a second, while hung processes write their
    stacks. process: role of this process. directories: directories of cores. rings: copies of
    further rings."""
    mono_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    found = [*rings, *(ring for each in directories if (ring := _latest_ring(each)) is not None)]
    stacks = [own_stacks(process), *gather_stacks(directories)]
    reason = reason.encode(errors="replace").decode()  # an error may name a file that is no UTF-8
    return FlightDump(reason, quire.__version__, wall_ns, mono_ns, found, stacks)


def _latest_ring(directory: Path) -> bytes | None:
    """Return the ring of the last core that was started here; None before the first."""
    numbers = [
        int(suffix)
        for path in directory.glob(f"{RING_PREFIX}*")
        if (suffix := path.name.removeprefix(RING_PREFIX)).isdecimal()
    ]
    with contextlib.suppress(OSError, ValueError):
        return (directory / f"{RING_PREFIX}{max(numbers)}").read_bytes()
    return None


def encode_dump(dump: FlightDump) -> bytes:
    """Return the bytes of a file: magic, length and digest of the packed rest, and that."""
    data = zlib.compress(msgspec.msgpack.encode(dump), 1)
    return MAGIC + len(data).to_bytes(8, "little") + _digest(data) + data


def decode_dump(data: bytes) -> FlightDump:
    """Read a file. Raises ConfigError for one that is no dump, or is not whole."""
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise ConfigError("it is no dump of the flight recorder. Name a flight-….bin file.")
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
    packed = data[_HEAD_BYTES:]
    if len(data) < _HEAD_BYTES or len(packed) < length:
        raise ConfigError(
            f"the dump is torn: it has {len(packed):,} of {length:,} bytes. Copy the file again."
        )
    if len(packed) > length or _digest(packed) != data[len(MAGIC) + 8 : _HEAD_BYTES]:
        raise ConfigError("the dump is damaged: its digest is another. Copy the file again.")
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(packed, MAX_DUMP_BYTES)
        if unpacker.unconsumed_tail:
            raise ConfigError(f"the dump unpacks to more than {MAX_DUMP_BYTES:,} bytes")
        return msgspec.msgpack.decode(plain, type=FlightDump)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"the dump cannot be read ({error}): use the quire that wrote it"
        ) from error


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def user_folder() -> Path:
    """Return the folder of this user's dumps, among the temporary files."""
    return Path(tempfile.gettempdir()) / f"quire-flight-{os.getuid()}"


class DumpFolder:
    """A folder of dumps that only this user can read. At most `num_kept` stay, the latest ones."""

    def __init__(self, path: Path, num_kept: int = NUM_KEPT) -> None:
        self.path, self._num_kept = path, num_kept

    def write(self, dump: FlightDump) -> Path | None:
        """Write a dump and return its file. A dump that cannot be written is logged. The fault
        it would tell of is worse."""
        try:
            self._make()
            when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(dump.wall_ns / 1e9))
            word = (re.findall(r"[a-z]+", dump.reason.lower()) or ["dump"])[0]
            number = f"{time.monotonic_ns():016x}"  # files of one second keep their order
            file = self.path / f"flight-{when}-{number}-{word}-{os.getpid()}.bin"
            partial = file.with_suffix(".partial")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as opened:
                opened.write(encode_dump(dump))
            partial.rename(file)
            self._prune()
        except OSError as error:
            logger.warning("the flight recorder's dump could not be written: %s", error)
            return None
        logger.warning("wrote what the engine did to %s; see: quire flight %s", file, file)
        return file

    def _make(self) -> None:
        """Make the folder. Raises OSError if another user could read or swap what is in it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or found.st_mode & 0o077:
            raise OSError(f"{self.path} is no folder that this user alone may enter (mode 0700)")

    def _prune(self) -> None:
        files = sorted([*self.path.glob("flight-*.bin"), *self.path.glob("flight-*.partial")])
        for file in files[: max(len(files) - self._num_kept, 0)]:
            file.unlink(missing_ok=True)


class FaultDumps:
    """Writes a dump when a fault comes, at most one in `BETWEEN_FAULTS_S`: the faults behind it
    are seldom news, and a dump takes time."""

    def __init__(
        self,
        folder: DumpFolder,
        take: Callable[[str], FlightDump],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """take: returns a dump with the reason that it is given."""
        self._folder, self._take, self._clock = folder, take, clock
        self._next = clock()
        self._lock = threading.Lock()

    def fault(self, reason: str) -> Path | None:
        """Write a dump, unless there was one just now. Return its file. A failure here is logged,
        since the engine still has a fault to mend."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return None
            self._next = now + BETWEEN_FAULTS_S
        try:
            return self._folder.write(self._take(reason))
        except Exception:
            logger.exception("the flight recorder's dump could not be made")
            return None
