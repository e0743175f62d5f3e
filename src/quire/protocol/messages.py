"""The messages between a front process, the engine core process and the one that watches it.

A request and an output are the dataclasses that the rest of the engine uses; the structs here say
what is done with them. `codec.py` makes bytes of them.
"""

from __future__ import annotations

import msgspec

from quire.base.telemetry import EngineStats
from quire.protocol.control import AdminOp, Report
from quire.protocol.media import ImageData
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.status import EngineCapacity, StartPhase
from quire.protocol.step import IntArray

__all__ = [
    "HANDLES_PER_CLIENT",
    "MAX_CLIENTS",
    "PROTOCOL_VERSION",
    "Abort",
    "Add",
    "Answer",
    "ClientMessage",
    "Control",
    "CoreMessage",
    "DropMedia",
    "Extend",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "Launch",
    "Output",
    "Probe",
    "PutMedia",
    "Refused",
    "Rejected",
    "StartFailure",
    "Welcome",
    "client_of",
]

PROTOCOL_VERSION = 10
"""Both sides must have the same; it grows with every change of a message."""

HANDLES_PER_CLIENT = 2**40
MAX_CLIENTS = 2**20
"""Client c owns the handles from c * HANDLES_PER_CLIENT on, so that a handle names its client."""


def client_of(handle: int) -> int:
    """The client that owns a handle."""
    return handle // HANDLES_PER_CLIENT


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a client, on every connection."""

    version: int
    client_id: int


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    handles: list[int]


class Extend(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """More of the prompt of an open request, and perhaps its end. A request that has ended is
    ignored; one that cannot be extended so is ended, and answered by `Refused`."""

    handle: int
    token_ids: IntArray
    is_last: bool


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """An operation beside steps, answered by `Answer`. query: the client's number for that."""

    query: int
    op: AdminOp


class PutMedia(msgspec.Struct, frozen=True, array_like=True, tag="put_media"):
    """Media of requests that will name `handle`, one of the client's; answered by `Answer`, at
    once, or when an image is encoded. data: image, or opaque bytes of prompt embeddings. is_spare:
    images of others are encoded first. query: see `Control`."""

    query: int
    handle: int
    data: bytes | ImageData
    is_spare: bool = False


class DropMedia(msgspec.Struct, frozen=True, array_like=True, tag="drop_media"):
    """Media that no open request names. The media of a client that leaves go with it."""

    handles: list[int]


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The client leaves; what it still has in the core is aborted, but what it pinned stays."""


ClientMessage = Hello | Add | Abort | Extend | Control | PutMedia | DropMedia | Goodbye


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to `Hello`. instance: number of cores before this one. state_version, sleep_level: see
    `Heartbeat`."""

    instance: int
    capacity: EngineCapacity
    state_version: int = 0
    sleep_level: int = 0


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """Answer to a `Hello` that the core cannot serve, for people."""

    message: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request that the core could never serve; nothing else will be said about it."""

    first_handle: int
    message: str


class Output(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """Output of one step for one client."""

    output: EngineOutput


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """report: None if the operation was refused; `message` then says why. state_version: version of
    the engine's state, see `Heartbeat`."""

    query: int
    report: Report | None
    message: str
    state_version: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Empty message. A client to which it cannot be sent is gone, and its open requests are
    freed."""


CoreMessage = Welcome | Rejected | Refused | Output | Answer | Probe


class Heartbeat(msgspec.Struct, frozen=True):
    """Published by the core several times a second, by a thread that does nothing else.

    It carries progress and not a verdict: a watcher tells a long step from a hung one by
    `step_seconds`, the age of the step that is in flight (None between steps), against
    `slowest_step_seconds`, the longest of those that ended of late. state_version: number of
    operations that may have changed `sleep_level`; an answer to one may come before an older beat.
    """

    instance: int
    phases: tuple[StartPhase, ...]
    is_ready: bool = False
    is_draining: bool = False
    capacity: EngineCapacity | None = None
    step_seconds: float | None = None
    slowest_step_seconds: float = 0.0
    stats: EngineStats = EngineStats()
    sleep_level: int = 0
    state_version: int = 0


class Launch(msgspec.Struct, frozen=True):
    """Launch of a core process, on its standard input, which then stays open while its parent
    lives. settings: values of `EngineSettings` by name. free_bytes: memory that all cores share and
    that was free before the first of them; None to measure it. replica: number of the core
    among those of a server. flight_dir: folder for dumps of the flight recorder."""

    version: int
    instance: int
    directory: str
    parent_pid: int
    heartbeat_interval_s: float
    max_message_bytes: int
    settings: dict[str, str | int | float | bool | None]
    flight_dir: str
    free_bytes: int | None = None
    replica: int = 0


class StartFailure(msgspec.Struct, frozen=True):
    """Why a core could not start. is_config: another start with these settings fails as well."""

    is_config: bool
    message: str
