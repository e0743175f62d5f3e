"""Copies KV blocks to slots of a file and back, in threads beside the steps."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from quire.compute.kv_transfer.block_file import BlockFile, SystemFile
from quire.compute.kv_transfer.pool_memory import Bytes, PoolMemory
from quire.config.kv_disk.records import HEADER_BYTES, RECORD, Records, seal
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome

__all__ = ["RESERVE_SHARE", "DiskBlocks", "open_disk"]

logger = logging.getLogger("quire")

RESERVE_SHARE = 0.02
"""Share of a file system that stays free: the file does not grow into it."""

SECONDS_TO_CLOSE = 10.0
"""Given to the saves of an engine that ends."""

SECONDS_PER_WARNING = 60.0

BUFFER_BYTES = 2**20
"""Bytes of a call for slots that follow each other: disks read and write this much at their best
speed."""


NO_PARENT = bytes(16)
"""Stands for the parent's name in the record of a block without one."""


class _CancelledError(Exception):
    """The move has been cancelled."""


class _Running:
    """A move that has not ended. It touches the pool only under its lock, and not once it has been
    cancelled: a disk may hang in a call, and nobody waits for it."""

    def __init__(self, move: BlockMove, memory: PoolMemory, done: Future[MoveOutcome]) -> None:
        self.move = move
        self._memory: PoolMemory | None = memory
        self._done = done
        self._lock = threading.Lock()

    def copy_out(self, run: range, targets: Bytes) -> list[int]:
        """Copy blocks of the move to the first bytes of `targets` [N, slot_bytes] each. Return how
        many there are of each."""
        places = self.move.blocks[run.start : run.stop].tolist()
        parts = [self.move.names[index].depth for index in run]
        with self._lock:
            copy_out = self._pool().copy_out
            return [copy_out(*each) for each in zip(places, parts, targets, strict=True)]

    def copy_in(self, index: int, source: Bytes) -> None:
        """Copy the first bytes of `source` to block number `index` of the move."""
        place, part = self._place(index)
        with self._lock:
            self._pool().copy_in(place, part, source)

    def num_bytes(self, index: int) -> int:
        """Return the bytes of block number `index` of the move."""
        with self._lock:
            return self._pool().num_bytes(*self._place(index))

    def _place(self, index: int) -> tuple[int, int]:
        return int(self.move.blocks[index]), self.move.names[index].depth

    def _pool(self) -> PoolMemory:
        if self._memory is None:
            raise _CancelledError
        return self._memory

    def end(self, outcome: MoveOutcome | BaseException) -> None:
        """Give the outcome, unless there has been one."""
        with self._lock:
            is_open, self._memory = self._memory is not None, None
        if is_open and isinstance(outcome, MoveOutcome):
            self._done.set_result(outcome)
        elif is_open and isinstance(outcome, BaseException):
            self._done.set_exception(outcome)


class _Line:
    """A thread that does one piece of work after the other. A process ends without it: threads of a
    pool are waited for, and a disk may hang in a call."""

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[tuple[Callable[[], None], Future[None]] | None]()
        self._is_closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do `work`, which raises nothing, after all that was given before. Return its end."""
        done = Future[None]()
        self._work.put((work, done))
        return done

    def _run(self) -> None:
        while (given := self._work.get()) is not None and not self._is_closed:
            work, done = given
            work()
            done.set_result(None)
            del given, work, done  # a move keeps the pool

    def close(self) -> None:
        """Begin no other work. What has begun is not waited for."""
        self._is_closed = True
        self._work.put(None)


class DiskBlocks:
    """One thread reads and one writes, each in the order in which moves were given.

    A move that fails loses its blocks and raises nothing. A save writes the payload before the
    record, so whatever ends the process leaves blocks that are whole, or that their checksum
    refuses.
    """

    def __init__(
        self,
        slots: BlockFile,
        header: BlockFile,
        slot_bytes: int,
        num_slots: int,
        free_bytes: Callable[[], tuple[int, int]],
        num_stored: int,
        lock: int | None = None,
    ) -> None:
        """free_bytes: returns the free bytes of the file system, and its size. num_stored: number
        of slots within the file. lock: see `OpenDisk`."""
        self._lock = lock
        self._slots = slots
        self._header = header
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._free_bytes = free_bytes
        self._num_stored = num_stored
        self._per_call = max(1, BUFFER_BYTES // slot_bytes)
        self._reader, self._writer = _Line("quire-disk-read"), _Line("quire-disk-write")
        self._buffers: dict[MoveKind, Bytes] = {}  # each of one thread
        self._running: dict[int, _Running] = {}
        self._warned_at = -SECONDS_PER_WARNING
        self._is_closing = False
        atexit.register(self.close)  # of a program that does not close its engine

    def start(self, move: BlockMove, memory: PoolMemory, done: Future[MoveOutcome]) -> None:
        """Give a move to its thread. memory: the pool, which stays as long as the move needs it."""
        thread = self._reader if move.kind is MoveKind.LOAD else self._writer
        self._running[move.ticket] = running = _Running(move, memory, done)
        thread.submit(partial(self._end, running))

    def cancel(self, ticket: int) -> None:
        """End a move at once as if nothing had arrived, if it has not ended. From now on it neither
        reads nor writes the pool."""
        running = self._running.pop(ticket, None)
        if running is not None:
            running.end(running.move.all_lost)

    def cancel_all(self) -> None:
        """Cancel all moves."""
        for ticket in list(self._running):
            self.cancel(ticket)

    def _end(self, running: _Running) -> None:
        move = running.move
        try:
            running.end(self._carry_out(running))
        except _CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  whoever waits takes all blocks for lost
            self._warn(move.kind.value, error)
            running.end(error)
        self._running.pop(move.ticket, None)

    def _carry_out(self, running: _Running) -> MoveOutcome:
        started, kind = time.perf_counter(), running.move.kind
        if kind is MoveKind.CLEAR:
            self._clear()
            return MoveOutcome()
        if kind is MoveKind.NOTE:
            self._note(running.move)
            return MoveOutcome()
        lost = self._save(running) if kind is MoveKind.SAVE else self._load(running)
        return MoveOutcome(np.array(lost, np.int32), time.perf_counter() - started)

    def _buffer(self, kind: MoveKind) -> Bytes:
        """Return the calling thread's buffer: pages of memory, past which no cache is needed."""
        found = self._buffers.get(kind)
        if found is None:
            size = self._per_call * self._slot_bytes
            self._buffers[kind] = found = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return found

    # --- saves -----------------------------------------------------------------------------------

    def _save(self, running: _Running) -> list[int]:
        """Write all payloads, and then the records of those that went well. Return the slots of
        the others."""
        move = running.move
        slots: list[int] = move.places.tolist()
        records = np.zeros(len(slots), RECORD)
        written: list[int] = []
        for run in self._batches(slots, range(len(slots))):
            written += self._save_run(running, run, records)
        if not written:
            return slots
        fields = zip(*(move.names[index] for index in written), strict=True)
        groups, names, parents, depths, values, hits = fields
        records = records[written]
        records["name"] = np.frombuffer(b"".join(names), "V16")
        parents = b"".join(each or NO_PARENT for each in parents)
        records["parent"] = np.frombuffer(parents, "V16")
        records["group"], records["depth"] = groups, depths
        records["value"], records["hits"] = values, hits
        records["seal"] = seal(records)
        kept = set(self._write_records([slots[index] for index in written], records))
        return [slot for slot in slots if slot not in kept]

    def _save_run(self, running: _Running, run: range, records: Records) -> list[int]:
        """Write payloads to slots that follow each other, and note their checksums. Return the
        indices of those that went well."""
        try:
            self._write_payloads(running, run, records)
        except _CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  the blocks stay on the device
            if len(run) == 1:
                self._warn("save", error)
                return []
            return [
                i for each in run for i in self._save_run(running, range(each, each + 1), records)
            ]
        return list(run)

    def _write_payloads(self, running: _Running, run: range, records: Records) -> None:
        """OSError where it fails."""
        first = int(running.move.places[run.start])
        if self._is_closing:
            raise OSError("the engine ends")
        self._check_room(first + len(run) - 1)
        buffer = self._buffer(MoveKind.SAVE)[: len(run) * self._slot_bytes]
        slots = buffer.reshape(len(run), self._slot_bytes)
        sizes = running.copy_out(run, slots)
        checksums: list[int] = []
        for slot, size in zip(slots, sizes, strict=True):
            if size < self._slot_bytes:
                slot[size:] = 0
            checksums.append(zlib.crc32(slot[:size].data))
        own = records[run.start : run.stop]
        own["num_bytes"], own["checksum"] = sizes, checksums
        self._slots.write([buffer.data], first * self._slot_bytes)
        self._num_stored = max(self._num_stored, first + len(run))

    def _check_room(self, slot: int) -> None:
        """OSError if the file would grow beyond its slots, or into the reserve."""
        if slot >= self._num_slots:
            raise OSError(f"slot {slot} is beyond the limit of {self._num_slots}")
        growth = (slot + 1 - self._num_stored) * self._slot_bytes
        if growth > 0:
            free, total = self._free_bytes()
            if free - growth < total * RESERVE_SHARE:
                raise OSError(f"{free:,} bytes are free, and {RESERVE_SHARE:.0%} are kept free")

    def _note(self, move: BlockMove) -> None:
        """Write values and hits into the records that are those of the move's names."""
        slots: list[int] = move.places.tolist()
        records = self._read_records(slots)
        is_whole = (seal(records) == records["seal"]).tolist()
        own = [
            index
            for index, (record, name) in enumerate(zip(records, move.names, strict=True))
            if is_whole[index]
            and (int(record["group"]), record["name"].tobytes()) == (name.group, name.name)
        ]
        records = records[own]
        for field in ("value", "hits"):
            records[field] = [getattr(move.names[index], field) for index in own]
        records["seal"] = seal(records)
        for _ in self._write_records([slots[index] for index in own], records):
            pass

    # --- loads -----------------------------------------------------------------------------------

    def _load(self, running: _Running) -> list[int]:
        """Read payloads into their blocks. Return those that hold nothing of worth."""
        move = running.move
        slots: list[int] = move.places.tolist()
        records = self._read_records(slots)
        seals = seal(records)
        fitting: list[int] = []
        for index, record in enumerate(records):
            try:
                self._check_record(running, index, record, int(seals[index]))
                fitting.append(index)
            except OSError as error:  # the tokens are computed
                self._warn("load", error)
        loaded = [
            index
            for run in self._batches(slots, fitting)
            for index in self._load_run(running, run, records)
        ]
        return np.delete(move.blocks, loaded).tolist()

    def _check_record(self, running: _Running, index: int, record: np.void, own: int) -> None:
        """OSError unless a record is that of the move's block number `index`. own: its seal."""
        slot, name = int(running.move.places[index]), running.move.names[index]
        if own != record["seal"]:
            raise OSError(f"the record of slot {slot} is torn")
        if (int(record["group"]), record["name"].tobytes()) != (name.group, name.name):
            raise OSError(f"slot {slot} was given to another block")
        if int(record["num_bytes"]) != running.num_bytes(index):
            raise OSError(f"slot {slot} has another number of bytes")

    def _load_run(self, running: _Running, run: range, records: Records) -> list[int]:
        """Read slots that follow each other. Return the indices of those that arrived."""
        first = int(running.move.places[run.start])
        buffer = self._buffer(MoveKind.LOAD)[: len(run) * self._slot_bytes]
        try:
            self._slots.read([buffer.data], first * self._slot_bytes)
        except Exception as error:  # noqa: BLE001  the tokens are computed
            if len(run) == 1:
                self._warn("load", error)
                return []
            return [
                i for each in run for i in self._load_run(running, range(each, each + 1), records)
            ]
        loaded: list[int] = []
        for index, slot in zip(run, buffer.reshape(len(run), self._slot_bytes), strict=True):
            record = records[index]
            if zlib.crc32(slot[: int(record["num_bytes"])].data) == int(record["checksum"]):
                running.copy_in(index, slot)
                loaded.append(index)
            else:
                place = int(running.move.places[index])
                self._warn("load", OSError(f"slot {place} does not have its checksum"))
        return loaded

    def _read_records(self, slots: Sequence[int]) -> Records:
        """Return the records of slots; zeros where they cannot be read."""
        records = np.zeros(len(slots), RECORD)
        runs = list(_runs(slots, range(len(slots))))
        for run in runs:
            data = bytearray(len(run) * RECORD.itemsize)
            try:
                self._header.read([memoryview(data)], _record_offset(slots[run.start]))
                records[run.start : run.stop] = np.frombuffer(data, RECORD)
            except OSError as error:
                self._warn("load", error)
                if len(run) > 1:  # those that the file has
                    runs += [range(index, index + 1) for index in run]
        return records

    # --- both ------------------------------------------------------------------------------------

    def _batches(self, slots: Sequence[int], indices: Iterable[int]) -> Iterator[range]:
        """Ranges of `indices` for one call each."""
        for run in _runs(slots, indices):
            for start in range(run.start, run.stop, self._per_call):
                yield range(start, min(run.stop, start + self._per_call))

    def _write_records(self, slots: Sequence[int], records: Records) -> Iterator[int]:
        """Write the records of slots. Yield the slots where that went well."""
        for run in _runs(slots, range(len(slots))):
            data = memoryview(records[run.start : run.stop].tobytes())
            try:
                self._header.write([data], _record_offset(slots[run.start]))
            except OSError as error:
                self._warn("save", error)
                continue
            yield from slots[run.start : run.stop]

    def _clear(self) -> None:
        try:
            self._header.cut(HEADER_BYTES)
            self._slots.cut(0)
            self._num_stored = 0
        except OSError as error:
            self._warn("clear", error)

    def _warn(self, what: str, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._warned_at >= SECONDS_PER_WARNING:
            self._warned_at = now
            logger.warning("the K/V disk failed to %s a block: %s", what, error)

    def close(self) -> None:
        """Let moves end, within `SECONDS_TO_CLOSE`, and close the files. A thread that has not
        ended then keeps them, and a writer its lock too."""
        atexit.unregister(self.close)
        threads = (self._writer, self._reader)
        written, read = last = [thread.submit(lambda: None) for thread in threads]
        wait(last, SECONDS_TO_CLOSE)
        if not written.done():
            logger.warning("the K/V disk is slow: blocks that were not saved yet are lost")
        self._is_closing = True
        for thread in threads:
            thread.close()
        if written.done() and read.done():
            self._slots.close()
            self._header.close()
        if written.done() and self._lock is not None:
            os.close(self._lock)


def open_disk(
    slots: Path,
    header: Path,
    slot_bytes: int,
    num_slots: int,
    *,
    is_writer: bool,
    lock: int | None = None,
) -> DiskBlocks:
    """Open a rank's files of a store. lock: see `OpenDisk`. OSError if they cannot be opened."""
    file = SystemFile(slots, is_writer=is_writer, is_direct=True)
    stored = -(-os.stat(slots).st_size // slot_bytes)

    def free_bytes() -> tuple[int, int]:
        facts = os.statvfs(slots)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize

    records = SystemFile(header, is_writer=is_writer)
    return DiskBlocks(file, records, slot_bytes, num_slots, free_bytes, stored, lock)


def _record_offset(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD.itemsize


def _runs(slots: Sequence[int], indices: Iterable[int]) -> Iterator[range]:
    """Ranges of `indices`, each the one after that before it, with slots that follow each other."""
    start = last = -1
    for index in indices:
        if start >= 0 and (index != last + 1 or slots[index] != slots[last] + 1):
            yield range(start, last + 1)
            start = -1
        if start < 0:
            start = index
        last = index
    if start >= 0:
        yield range(start, last + 1)
