"""Readings that the front processes of one server exchange, in files that all can read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.server.readings.metrics import ServerMetrics

__all__ = ["FrontBoard", "FrontReading"]

PREFIX = "front-"


class FrontReading(msgspec.Struct):
    """Counts of one front, or of several. num_waiting_…: requests before their first step, and
    their prompt tokens. refused: requests shed by the waiting room, by reason. num_spans_…: spans
    of traces that the collector took, and those that were dropped."""

    metrics: ServerMetrics
    num_waiting_requests: int = 0
    num_waiting_tokens: int = 0
    refused: dict[str, int] = {}
    num_spans_sent: int = 0
    num_spans_dropped: int = 0

    def add(self, other: FrontReading) -> None:
        """Add the counts of another front."""
        self.metrics.add(other.metrics)
        self.num_waiting_requests += other.num_waiting_requests
        self.num_waiting_tokens += other.num_waiting_tokens
        self.num_spans_sent += other.num_spans_sent
        self.num_spans_dropped += other.num_spans_dropped
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count


class FrontBoard:
    """The latest reading of each front, by its number. Readings of ended fronts stay, so that sums
    of counters never fall."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._codec: Codec[FrontReading] = Codec(FrontReading)

    @property
    def directory(self) -> Path:
        """Folder that all fronts share."""
        return self._directory

    def write(self, front: int, reading: FrontReading) -> None:
        partial = self._directory / f"partial-{PREFIX}{front}"
        partial.write_bytes(encode(reading))
        partial.rename(self._path(front))

    def has(self, front: int) -> bool:
        """Return True if the front has written a reading."""
        return self._path(front).exists()

    def retire(self, front: int) -> None:
        """Note that the front has ended: its open requests are gone, its counts stay."""
        reading = self._read(self._path(front))
        if reading is not None:
            reading.metrics.num_open_requests = 0
            reading.num_waiting_requests = reading.num_waiting_tokens = 0
            self.write(front, reading)

    def total(self, own: FrontReading | None = None, front: int | None = None) -> FrontReading:
        """Return the sum over all fronts. own: reading of front number `front`, fresher than its
        file."""
        total = FrontReading(ServerMetrics())
        if own is not None:
            total.add(own)
        for path in self._directory.glob(f"{PREFIX}*"):
            reading = None if front is not None and path == self._path(front) else self._read(path)
            if reading is not None:
                total.add(reading)
        return total

    def _read(self, path: Path) -> FrontReading | None:
        with contextlib.suppress(OSError, GarbledMessageError):
            return self._codec.decode(path.read_bytes())
        return None

    def _path(self, front: int) -> Path:
        return self._directory / f"{PREFIX}{front}"
