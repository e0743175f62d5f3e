"""Messages between a supervisor and a starting core, beside the heartbeat: the launch on the core's
standard input, and the end of the start in files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.errors import ConfigError
from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.messages import PROTOCOL_VERSION, Launch, StartFailure

__all__ = [
    "launch_bytes",
    "mark_ready",
    "read_failure",
    "read_launch",
    "read_message",
    "was_ready",
    "write_failure",
]

LENGTH_BYTES = 4

Message = TypeVar("Message", bound=msgspec.Struct)


def launch_bytes(launch: msgspec.Struct) -> bytes:
    """Encode a launch for the standard input of a process."""
    data = encode(launch)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_message(descriptor: int, codec: Codec[Message]) -> Message:
    """Reads no further than what `launch_bytes` gave. Raises ConfigError if it is not there."""
    length = int.from_bytes(_read_exactly(descriptor, LENGTH_BYTES), "big")
    try:
        return codec.decode(_read_exactly(descriptor, length))
    except GarbledMessageError as error:
        raise ConfigError(f"the launch message cannot be read: {error}") from error


def read_launch(descriptor: int) -> Launch:
    """Read a core's launch. Raises ConfigError if there is none, or of another version of quire."""
    launch: Launch = read_message(descriptor, Codec(Launch))
    if launch.version != PROTOCOL_VERSION:
        raise ConfigError(
            f"the supervisor speaks version {launch.version} of the protocol and this engine core "
            f"version {PROTOCOL_VERSION}: start both from the same installation"
        )
    return launch


def _read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            raise ConfigError(
                "standard input ended before the launch message: this module is started by a "
                "server; use `quire serve`"
            )
        data += piece
    return data


def write_failure(directory: Path, instance: int, failure: StartFailure) -> None:
    path = _failure_path(directory, instance)
    partial = path.with_name(f"partial-{instance}")
    partial.write_bytes(encode(failure))
    partial.rename(path)


def read_failure(directory: Path, instance: int) -> StartFailure | None:
    """Why a core could not start; None if it did not say."""
    codec: Codec[StartFailure] = Codec(StartFailure)
    with contextlib.suppress(OSError, GarbledMessageError):
        return codec.decode(_failure_path(directory, instance).read_bytes())
    return None


def _failure_path(directory: Path, instance: int) -> Path:
    return directory / f"failure-{instance}"


def mark_ready(directory: Path, instance: int) -> None:
    """The start has ended well. A file, since a core may die before its next heartbeat."""
    _ready_path(directory, instance).touch()


def was_ready(directory: Path, instance: int) -> bool:
    """Return whether a core's start had ended well."""
    return _ready_path(directory, instance).exists()


def _ready_path(directory: Path, instance: int) -> Path:
    return directory / f"ready-{instance}"
