"""Messages between a supervisor and a starting core, beside the heartbeat: the launch on the core's
standard input, and the end of the start in files. Also what a core leaves to the next one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from quire.base.errors import ConfigError
from quire.protocol.codec import Codec, GarbledMessageError, encode, read_message
from quire.protocol.control import LoadWeights, Pause, Report, Sleep
from quire.protocol.messages import PROTOCOL_VERSION, Launch, StartFailure

__all__ = [
    "mark_ready",
    "note_rest",
    "read_failure",
    "read_launch",
    "read_rest",
    "read_weights",
    "was_ready",
    "write_failure",
]

_REST = "rest"
_WEIGHTS = "loaded-weights"


def read_launch(descriptor: int) -> Launch:
    """Read a core's launch. Raises ConfigError if there is none, or of another version of quire."""
    launch: Launch = read_message(descriptor, Codec(Launch))
    if launch.version != PROTOCOL_VERSION:
        raise ConfigError(
            f"the supervisor speaks version {launch.version} of the protocol and this engine core "
            f"version {PROTOCOL_VERSION}: start both from the same installation"
        )
    return launch


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


def note_rest(directory: Path, report: Report) -> None:
    """Leave to the next core which weights this one computes with, and whether it is paused or
    sleeps. OSError if it cannot be."""
    path = directory / _REST
    if report.sleep_level:
        path.write_bytes(encode(Sleep(report.sleep_level, "keep")))
    elif report.is_paused:
        path.write_bytes(encode(Pause("keep")))
    else:
        path.unlink(missing_ok=True)
    if report.weights_version:
        partial = directory / f"partial-{_WEIGHTS}"
        partial.write_bytes(encode(report.loaded))
        partial.rename(directory / _WEIGHTS)


def read_rest(directory: Path) -> Pause | Sleep | None:
    """Return what a core that follows another one must do before it serves anything."""
    codec: Codec[Pause | Sleep] = Codec(Pause | Sleep)
    with contextlib.suppress(OSError, GarbledMessageError):
        return codec.decode((directory / _REST).read_bytes())
    return None


def read_weights(directory: Path) -> LoadWeights | None:
    """Return the weights that a core must load before anything else; None for the checkpoint's.
    Raises GarbledMessageError or OSError if the core before it left some that cannot be told."""
    with contextlib.suppress(FileNotFoundError):
        return Codec[LoadWeights](LoadWeights).decode((directory / _WEIGHTS).read_bytes())
    return None
