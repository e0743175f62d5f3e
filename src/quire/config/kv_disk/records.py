"""The header file of a store: one record for each slot of the slot file.

The file begins with `HEADER_BYTES` of JSON that say what the blocks are. Record i stands at
`HEADER_BYTES + i * RECORD.itemsize` and is written after the payload of slot i, so a write that was
cut short leaves a record that its payload contradicts. A record that was cut itself fails its seal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError

__all__ = [
    "HEADER_BYTES",
    "RECORD",
    "Records",
    "StoreHeader",
    "read_header",
    "read_records",
    "seal",
]

HEADER_BYTES = 4096

FORMAT = 2
"""Raised when the bytes of pages, slots or records change their meaning."""

RECORD = np.dtype(
    [
        ("name", "V16"),
        ("parent", "V16"),
        ("value", "<f8"),
        ("checksum", "<u4"),
        ("group", "<u2"),
        ("hits", "<u2"),
        ("depth", "<u4"),
        ("num_bytes", "<u4"),
        ("seal", "<u8"),
    ]
)
"""name: block name. parent: name of the block before it, if depth is above 0. depth: index in the
prompt. group: number of the layer group.
value, hits: see `SlotTree`. num_bytes: bytes of the payload. checksum: its CRC-32."""

Records = npt.NDArray[np.void]

_WORDS = (RECORD.itemsize - 8) // 8
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, i + 1, 2**64) | 1 for i in range(_WORDS)], np.uint64)


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """identity: hex digest of everything that decides the K/V. model: for people. block_bytes: size
    of a payload. slot_bytes: distance between two slots. max_bytes: limit of its files. num_ranks:
    number of ranks, each with files of its own."""

    identity: str
    model: str
    block_bytes: int
    slot_bytes: int
    max_bytes: int
    num_ranks: int = 1
    format: int = FORMAT

    @property
    def num_slots(self) -> int:
        """Slots of each rank, so that payloads and records of all fit into `max_bytes`."""
        own_bytes = self.max_bytes // self.num_ranks
        return max(0, own_bytes - HEADER_BYTES) // (self.slot_bytes + RECORD.itemsize)

    def encode(self) -> bytes:
        """Return the first bytes of the header file."""
        return json.dumps(asdict(self)).encode().ljust(HEADER_BYTES)


def seal(records: Records) -> npt.NDArray[np.uint64]:
    """Return the seals of records [N]: sums of their words, each word times an odd factor of its
    own and mixed, so that a record of parts of two others fails."""
    words = np.frombuffer(records.tobytes(), np.uint64).reshape(-1, _WORDS + 1)[:, :_WORDS]
    mixed = (words ^ (words >> np.uint64(29))) * _FACTORS
    mixed ^= mixed >> np.uint64(32)
    return (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(axis=1, dtype=np.uint64) + np.uint64(1)


def read_header(path: Path) -> StoreHeader:
    """Read the header of a header file. ConfigError if it is none of this format."""
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    try:
        header = StoreHeader(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is no header of a K/V store ({error}). Remove its folder."
        ) from error
    if header.format != FORMAT:
        raise ConfigError(
            f"{path} has format {header.format}, this version of quire reads {FORMAT}. "
            "Remove its folder."
        )
    return header


def read_records(path: Path, num_slots: int) -> Records:
    """Return the records of a header file, [number of whole records]; those that are empty, torn or
    changed have depth and name 0 and seal 0."""
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        data = file.read(num_slots * RECORD.itemsize)
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD).copy()
    if len(records):
        records[seal(records) != records["seal"]] = np.zeros((), RECORD)
    return records
