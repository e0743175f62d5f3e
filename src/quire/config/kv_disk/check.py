"""Looks through the stores of a folder, and clears it."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError
from quire.config.kv_disk.folder import KVFolder, StoreFiles
from quire.config.kv_disk.pins import read_pins
from quire.config.kv_disk.records import StoreHeader, read_records

__all__ = ["StoreReading", "clear", "read_store", "verify"]


@dataclass(frozen=True, slots=True)
class StoreReading:
    """A reading of a store. num_blocks: number of whole records. num_bytes: size of the files.
    pins: number of pinned prefixes; None if their list is damaged. is_in_use: True if an engine
    writes it. damaged: number of blocks with another payload than was written; None if nobody has
    looked."""

    store: str
    model: str
    num_blocks: int
    max_blocks: int
    num_bytes: int
    max_bytes: int
    pins: int | None
    is_in_use: bool
    damaged: int | None = None


def read_store(files: StoreFiles, header: StoreHeader) -> StoreReading:
    """Read the records of a store."""
    records = files.read_records(header)
    return StoreReading(
        store=files.folder.name,
        model=header.model,
        num_blocks=int(np.count_nonzero(records["seal"])),
        max_blocks=header.num_slots,
        num_bytes=files.num_bytes,
        max_bytes=header.max_bytes,
        pins=_count_pins(files, header),
        is_in_use=files.is_locked,
    )


def _count_pins(files: StoreFiles, header: StoreHeader) -> int | None:
    try:
        return len(read_pins(files.pins, header.identity))
    except (OSError, ConfigError):
        return None


def verify(files: StoreFiles, header: StoreHeader) -> int:
    """Read all payloads, and return how many blocks differ from what was written. A block that an
    engine has replaced meanwhile is none of them."""
    ranks = range(header.num_ranks)
    return len({slot for rank in ranks for slot in _damaged(files, header, rank)})


def _damaged(files: StoreFiles, header: StoreHeader, rank: int) -> list[int]:
    path = files.header_of(rank)
    before = read_records(path, header.num_slots)
    filled = np.flatnonzero(before["seal"]).tolist()
    damaged: list[int] = []
    with files.slots_of(rank).open("rb") as file:
        for slot in filled:
            num_bytes = int(before[slot]["num_bytes"])
            data = os.pread(file.fileno(), num_bytes, slot * header.slot_bytes)
            if zlib.crc32(data) != before[slot]["checksum"]:
                damaged.append(slot)
    after = read_records(path, header.num_slots)
    return [slot for slot in damaged if slot < len(after) and before[slot] == after[slot]]


def clear(folder: KVFolder) -> int:
    """Remove all stores, those of other versions too; the key stays. Return their bytes.
    ConfigError, and nothing is removed, if an engine writes one; also if one cannot be removed."""
    with folder.alone():
        stores = folder.all_files()
        for files in filter(lambda each: each.is_locked, stores):
            header = files.read()
            model = "another version" if header is None else header.model
            raise ConfigError(
                f"an engine with {model} writes to {folder.folder}. Stop it first, or ask it: POST "
                "/reset_prefix_cache drops what it has stored."
            )
        num_bytes = sum(files.num_bytes for files in stores)
        left = [files.folder for files in stores if not files.remove()]
    if left:
        raise ConfigError(f"{left[0]} cannot be removed. Use the account that wrote it.")
    return num_bytes
