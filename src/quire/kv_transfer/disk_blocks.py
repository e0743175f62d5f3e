"""Copies KV blocks to slots of a file and back, in threads beside the steps."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch

from quire.config.kv_disk.records import HEADER_BYTES, RECORD, Records, seal
from quire.kv_transfer.block_file import BlockFile, SystemFile
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome

__all__ = ["RESERVE_SHARE", "DiskBlocks", "open_disk"]

logger = logging.getLogger("quire")

RESERVE_SHARE = 0.02
"""Share of a file system that stays free: the file does not grow into it."""

SECONDS_TO_CLOSE = 10.0
"""Given to the saves of an engine that ends."""

SECONDS_PER_WARNING = 60.0


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
        self._reader = ThreadPoolExecutor(1, "quire-disk-read")
        self._writer = ThreadPoolExecutor(1, "quire-disk-write")
        self._warned_at = -SECONDS_PER_WARNING
        self._is_closing = False

    def start(self, move: BlockMove, pages: torch.Tensor, done: Future[MoveOutcome]) -> None:
        """Give a move to its thread. pages: the KV pool's on a CPU, uint8 [N, B,
        segment_bytes]; they stay as long as the move needs them."""
        thread = self._reader if move.kind is MoveKind.LOAD else self._writer
        thread.submit(self._end, move, pages, done)

    def _end(self, move: BlockMove, pages: torch.Tensor, done: Future[MoveOutcome]) -> None:
        try:
            done.set_result(self._carry_out(move, pages))
        except BaseException as error:  # noqa: BLE001  whoever waits takes all blocks for lost
            self._warn(move.kind.value, error)
            done.set_exception(error)

    def _carry_out(self, move: BlockMove, pages: torch.Tensor) -> MoveOutcome:
        started = time.perf_counter()
        if move.kind is MoveKind.CLEAR:
            self._clear()
            return MoveOutcome()
        lost = self._save(move, pages) if move.kind is MoveKind.SAVE else self._load(move, pages)
        return MoveOutcome(np.array(lost, np.int32), time.perf_counter() - started)

    def _save(self, move: BlockMove, pages: torch.Tensor) -> list[int]:
        """Write all payloads, and then the records of those that went well. Return the slots of
        the others."""
        slots: list[int] = move.places.tolist()
        records = np.zeros(len(slots), RECORD)
        written: list[int] = []
        for index, (block, slot) in enumerate(zip(move.blocks.tolist(), slots, strict=True)):
            try:
                records["checksum"][index] = self._save_block(_pieces(pages, block), slot)
                written.append(index)
            except Exception as error:  # noqa: BLE001  the block stays on the device
                self._warn("save", error)
        if not written:
            return slots
        names = [move.names[index] for index in written]
        records = records[written]
        records["name"] = [np.void(each.name) for each in names]
        records["parent"] = [np.void(each.parent.ljust(16, b"\0")) for each in names]
        for field in ("group", "depth", "value", "hits"):
            records[field] = [getattr(each, field) for each in names]
        records["seal"] = seal(records)
        kept = set(self._write_records([slots[index] for index in written], records))
        return [slot for slot in slots if slot not in kept]

    def _save_block(self, pieces: list[memoryview], slot: int) -> int:
        """Write a payload. Return its checksum. OSError where it fails."""
        if self._is_closing:
            raise OSError("the engine ends")
        self._check_room(slot)
        checksum = _checksum(pieces)
        self._slots.write(pieces, slot * self._slot_bytes)
        self._num_stored = max(self._num_stored, slot + 1)
        return checksum

    def _check_room(self, slot: int) -> None:
        """OSError if the file would grow beyond its slots, or into the reserve."""
        if slot >= self._num_slots:
            raise OSError(f"slot {slot} is beyond the limit of {self._num_slots}")
        growth = (slot + 1 - self._num_stored) * self._slot_bytes
        if growth > 0:
            free, total = self._free_bytes()
            if free - growth < total * RESERVE_SHARE:
                raise OSError(f"{free:,} bytes are free, and {RESERVE_SHARE:.0%} are kept free")

    def _load(self, move: BlockMove, pages: torch.Tensor) -> list[int]:
        """Read payloads into their blocks. Return those that hold nothing of worth."""
        blocks: list[int] = move.blocks.tolist()
        slots: list[int] = move.places.tolist()
        lost: list[int] = []
        records = self._read_records(slots)
        seals = seal(records)
        for index, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            record, name = records[index], move.names[index]
            try:
                if seals[index] != record["seal"]:
                    raise OSError(f"the record of slot {slot} is torn")
                if (int(record["group"]), record["name"].tobytes()) != (name.group, name.name):
                    raise OSError(f"slot {slot} was given to another block")
                pieces = _pieces(pages, block)
                self._slots.read(pieces, slot * self._slot_bytes)
                if _checksum(pieces) != int(record["checksum"]):
                    raise OSError(f"slot {slot} does not have its checksum")
            except Exception as error:  # noqa: BLE001  the tokens are computed
                self._warn("load", error)
                lost.append(block)
        return lost

    def _read_records(self, slots: Sequence[int]) -> Records:
        """Return the records of slots; zeros where they cannot be read."""
        records = np.zeros(len(slots), RECORD)
        runs = list(_runs(slots))
        for run in runs:
            data = bytearray((run.stop - run.start) * RECORD.itemsize)
            try:
                self._header.read([memoryview(data)], _record_offset(slots[run.start]))
                records[run] = np.frombuffer(data, RECORD)
            except OSError as error:
                self._warn("load", error)
                if run.stop - run.start > 1:  # those that the file has
                    runs += [slice(index, index + 1) for index in range(run.start, run.stop)]
        return records

    def _write_records(self, slots: Sequence[int], records: Records) -> Iterator[int]:
        """Write the records of slots. Yield the slots where that went well."""
        for run in _runs(slots):
            data = memoryview(records[run].tobytes())
            try:
                self._header.write([data], _record_offset(slots[run.start]))
            except OSError as error:
                self._warn("save", error)
                continue
            yield from slots[run]

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
        threads = (self._writer, self._reader)
        written, read = last = [thread.submit(lambda: None) for thread in threads]
        wait(last, SECONDS_TO_CLOSE)
        if not written.done():
            logger.warning("the K/V disk is slow: blocks that were not saved yet are lost")
        self._is_closing = True
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)
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


def _pieces(pages: torch.Tensor, block: int) -> list[memoryview]:
    """The memory of a block, a piece for each plane of each layer."""
    return list(map(memoryview, pages.numpy()[:, block]))


def _record_offset(slot: int) -> int:
    return HEADER_BYTES + slot * RECORD.itemsize


def _runs(slots: Sequence[int]) -> Iterator[slice]:
    """Ranges of `slots` in which each is the one after that before it."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slice(start, index)
            start = index


def _checksum(pieces: Sequence[memoryview]) -> int:
    """CRC-32: 4.2 GB/s here, and it frees the interpreter lock."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value
