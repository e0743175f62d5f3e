"""Keeps a list of an engine's pins beside its K/V on disk, for the next engine."""

from __future__ import annotations

import logging
import time

from quire.base.errors import ConfigError
from quire.base.platform.background import Background
from quire.config.kv_disk.folder import StoreFiles
from quire.config.kv_disk.pins import read_pins, write_pins
from quire.plan.scheduler.pins import PinnedPrefixes
from quire.protocol.pins import KeptPin

__all__ = ["PinList"]

logger = logging.getLogger("quire")

SECONDS_TO_READ = 10.0
"""Wait for the list of a disk that may hang. The engine starts without it then."""

SECONDS_TO_CLOSE = 5.0

SECONDS_TO_RETRY = 30.0
"""Time after which a list that could not be written is tried again."""


class PinList:
    """The file of a store that lists pins. Changes are written in a thread, the last one wins, and
    none before `begin`: an engine that ends while it starts loses nothing."""

    def __init__(self, files: StoreFiles, identity: str, *, is_writer: bool) -> None:
        """identity: `StoreHeader.identity`. is_writer: False for an engine that only reads."""
        self._path = files.pins
        self._identity = identity
        self._is_writer = is_writer
        self._written = -1  # version of the pins
        self._failed_at: float | None = None  # time of the last write, if it failed
        self._has_begun = False
        self._next: list[KeptPin] = []
        self._found: list[KeptPin] = []
        self._reading = Background("quire-pins-read", self._read)
        self._writing = Background("quire-pins-write", self._write)

    def read(self) -> list[KeptPin]:
        """Return the pins of `read_pins`. A list that cannot be read is a warning."""
        self._reading.ask()
        if not self._reading.wait(SECONDS_TO_READ):
            logger.warning("the pins in %s are not read: the disk does not answer", self._path)
            self._is_writer = False  # they are there when it answers
            return []
        return self._found

    def _read(self) -> None:
        try:
            self._found = read_pins(self._path, self._identity)
        except (OSError, ConfigError) as error:
            logger.warning("the pins of an earlier engine are lost: %s", error)

    def begin(self) -> None:
        """Write changes from now on."""
        self._has_begun = self._is_writer

    def look(self, pins: PinnedPrefixes, now: float) -> None:
        """Write the list if pins have changed, or it could not be written some time ago. now: time
        on the clock of the scheduler."""
        failed_at = self._failed_at
        is_due = failed_at is not None and time.monotonic() - failed_at > SECONDS_TO_RETRY
        if self._has_begun and (is_due or pins.version != self._written):
            self._failed_at = None
            self._written = pins.version
            self._next = pins.kept(now, time.time())
            self._writing.ask()

    def _write(self) -> None:
        try:
            write_pins(self._path, self._identity, self._next)
            self._failed_at = None
        except OSError as error:
            self._failed_at = time.monotonic()
            logger.warning("the list of pins is not kept: %s", error)

    def close(self) -> None:
        """Wait for the last change, within `SECONDS_TO_CLOSE`. One that failed is tried again."""
        if self._failed_at is not None:
            self._writing.ask()
        self._writing.wait(SECONDS_TO_CLOSE)
