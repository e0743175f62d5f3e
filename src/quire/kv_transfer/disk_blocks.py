"""Copies KV blocks to slots of a file and back, in threads beside the steps."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from quire.config.kv_disk.records import HEADER_BYTES, RECORD, seal
from quire.kv_transfer.block_file import BlockFile, SystemFile
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome, SavedBlock

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
        """free_bytes: returns those that are free in the file system, and that it has. num_stored:
        slots that the file has bytes of. lock: see `OpenDisk`."""
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
        """Give a move to its thread. pages: those of the KV pool on a CPU, uint8 [N, B,
        segment_bytes]; they stay as long as the move needs them."""
        thread = self._reader if move.kind is MoveKind.LOAD else self._writer
        thread.submit(lambda: done.set_result(self._carry_out(move, pages)))

    def _carry_out(self, move: BlockMove, pages: torch.Tensor) -> MoveOutcome:
        started = time.perf_counter()
        if move.kind is MoveKind.CLEAR:
            self._clear()
            return MoveOutcome()
        lost: list[int] = []
        rows = zip(move.blocks.tolist(), move.places.tolist(), move.names, strict=True)
        for block, slot, saved in rows:
            pieces = _pieces(pages, block)
            if move.kind is MoveKind.SAVE:
                if self._is_closing or not self._save(pieces, slot, saved):
                    lost.append(slot)
            elif not self._load(pieces, slot, saved):
                lost.append(block)
        return MoveOutcome(np.array(lost, np.int32), time.perf_counter() - started)

    def _save(self, pieces: list[memoryview], slot: int, block: SavedBlock) -> bool:
        try:
            self._check_room(slot)
            checksum = _checksum(pieces)
            self._slots.write(pieces, slot * self._slot_bytes)
            self._write_record(slot, block, checksum)
        except Exception as error:  # noqa: BLE001  the block stays on the device, whatever it was
            self._warn("save", error)
            return False
        self._num_stored = max(self._num_stored, slot + 1)
        return True

    def _check_room(self, slot: int) -> None:
        """OSError if the file would grow beyond its slots, or into the reserve."""
        if slot >= self._num_slots:
            raise OSError(f"slot {slot} is beyond the limit of {self._num_slots}")
        growth = (slot + 1 - self._num_stored) * self._slot_bytes
        if growth > 0:
            free, total = self._free_bytes()
            if free - growth < total * RESERVE_SHARE:
                raise OSError(f"{free:,} bytes are free, and {RESERVE_SHARE:.0%} are kept free")

    def _load(self, pieces: list[memoryview], slot: int, block: SavedBlock) -> bool:
        try:
            record = self._read_record(slot)
            if (int(record["group"]), record["name"].tobytes()) != (block.group, block.name):
                return False  # another process has written it
            self._slots.read(pieces, slot * self._slot_bytes)
            if _checksum(pieces) != int(record["checksum"]):
                raise OSError(f"slot {slot} does not have its checksum")
        except Exception as error:  # noqa: BLE001  the tokens are computed, whatever it was
            self._warn("load", error)
            return False
        return True

    def _read_record(self, slot: int) -> np.void:
        data = bytearray(RECORD.itemsize)
        self._header.read([memoryview(data)], HEADER_BYTES + slot * RECORD.itemsize)
        records = np.frombuffer(data, RECORD)
        if seal(records)[0] != records["seal"][0]:
            raise OSError(f"the record of slot {slot} is torn")
        return records[0]

    def _write_record(self, slot: int, block: SavedBlock, checksum: int) -> None:
        record = np.zeros(1, RECORD)
        record["name"] = np.void(block.name)
        record["parent"] = np.void(block.parent.ljust(16, b"\0"))
        record["group"], record["depth"] = block.group, block.depth
        record["value"], record["hits"] = block.value, block.hits
        record["checksum"] = checksum
        record["seal"] = seal(record)
        data = memoryview(record.tobytes())
        self._header.write([data], HEADER_BYTES + slot * RECORD.itemsize)

    def _clear(self) -> None:
        try:
            self._header.cut(HEADER_BYTES)
            self._slots.cut(0)
            self._num_stored = 0
        except OSError as error:
            self._warn("clear", error)

    def _warn(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned_at >= SECONDS_PER_WARNING:
            self._warned_at = now
            logger.warning("the K/V disk failed to %s a block: %s", what, error)

    def close(self) -> None:
        """Let saves end, within `SECONDS_TO_CLOSE`, and close the files."""
        last = self._writer.submit(lambda: None)
        try:
            last.result(SECONDS_TO_CLOSE)
        except TimeoutError:
            logger.warning("the K/V disk is slow: what was not saved is lost")
        self._is_closing = True
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        if last.done():
            self._reader.shutdown(wait=True)
            self._slots.close()
            self._header.close()
            if self._lock is not None:
                os.close(self._lock)


def open_disk(
    slots: Path, header: Path, slot_bytes: int, num_slots: int, *, lock: int | None
) -> DiskBlocks:
    """Open the files of a store. lock: as of `OpenDisk`. OSError if they cannot be opened."""
    is_writer = lock is not None
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


def _checksum(pieces: Sequence[memoryview]) -> int:
    """CRC-32: 4.2 GB/s here, and it frees the interpreter lock."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value
