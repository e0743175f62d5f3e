"""The file that lists the pinned prefixes of a store's writer."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.base.errors import ConfigError
from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.pins import KeptPin

__all__ = ["read_pins", "write_pins"]

CHECKSUM_BYTES = 4


class _PinFile(msgspec.Struct, array_like=True):
    """identity: `StoreHeader.identity` of the store."""

    identity: str
    pins: list[KeptPin]


_CODEC = Codec[_PinFile](_PinFile)


def write_pins(path: Path, identity: str, pins: Sequence[KeptPin]) -> None:
    """Replace the file whole, with mode 0600, so that a crash leaves the old one or the new one.
    OSError where that fails."""
    data = encode(_PinFile(identity, list(pins)))
    draft = path.with_name(f"{path.name}.draft")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(draft, flags, 0o600), "wb") as file:
        file.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") + data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_pins(path: Path, identity: str) -> list[KeptPin]:
    """Return the pins of the file that have not ended; none without a file. ConfigError if it is
    damaged or of another store, OSError if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    with open(descriptor, "rb") as file:
        checksum, data = file.read(CHECKSUM_BYTES), file.read()
    if zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise ConfigError(f"{path} does not have its checksum")
    try:
        found = _CODEC.decode(data)
    except GarbledMessageError as error:
        raise ConfigError(f"{path} is no list of pins: {error}") from error
    if found.identity != identity:
        raise ConfigError(f"{path} belongs to another store")
    now = time.time()
    return [each for each in found.pins if each.expires_s is None or each.expires_s > now]
