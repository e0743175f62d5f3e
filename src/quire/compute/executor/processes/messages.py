"""Messages between an engine core and the processes of its ranks.

Plans and late input have a layout of their own (`step_codec`); rare messages are structs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

import msgspec

import quire
from quire.base.telemetry.flight.stacks import StackPlace
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove
from quire.protocol.control import Report, WorkerOp
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.step import IntArray

__all__ = [
    "RankAdapter",
    "RankCancel",
    "RankDrop",
    "RankLaunch",
    "RankMedia",
    "RankMeeting",
    "RankMessage",
    "RankMove",
    "RankMoved",
    "RankOp",
    "RankReply",
    "computes_with",
]


class RankMessage(IntEnum):
    """Kinds of messages to all ranks."""

    PLAN = 1
    LATE = 2
    CONTROL = 3
    READ_ADAPTER = 4
    PUT_ADAPTER = 5
    MOVE = 6
    CANCEL_MOVE = 7
    MEDIA = 8
    DROP_MEDIA = 9


class RankMeeting(msgspec.Struct, frozen=True):
    """The place where ranks on several hosts meet, as in `GlooMeeting`; each host fills in its own
    address."""

    host: str
    port: int
    address: str = ""


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the process of a rank, on its standard input.

    settings: values by name in `EngineSettings`, with all measured values. free_bytes,
    memory_bytes: memory of the host as the core saw it, so that each rank makes the core's plan.
    stacks: place for the stacks of the rank's threads; None if nobody could read them there.
    meeting: meeting of ranks on several hosts; None if they meet in the region. region, ring,
    wakeup, replies, moved: descriptors that the process inherits. reader: its number among the
    ring's readers. `RankGroup` fills in the last seven.
    """

    rank: int
    size: int
    settings: Mapping[str, str | int | float | bool | None]
    free_bytes: int
    memory_bytes: int
    stacks: StackPlace | None = None
    meeting: RankMeeting | None = None
    parent_pid: int = 0
    region: int = -1
    ring: int = -1
    reader: int = 0
    wakeup: int = -1
    replies: int = -1
    moved: int = -1


class RankOp(msgspec.Struct, frozen=True):
    """An operation between steps. `RankReply` answers it."""

    op: WorkerOp


class RankAdapter(msgspec.Struct, frozen=True):
    """An adapter for a slot: to read beside steps, or to put there between two of them. `RankReply`
    answers both."""

    slot: int
    ref: AdapterRef


class RankMove(msgspec.Struct, frozen=True):
    """Blocks that go to the rank's files or come back, after the steps before it. `RankMoved`
    answers on a pipe of its own, whenever the move ends."""

    move: BlockMove


class RankCancel(msgspec.Struct, frozen=True):
    """A move to end at once, if it has not ended. `RankMoved` answers the move, as always."""

    ticket: int


class RankMedia(msgspec.Struct, frozen=True):
    """Rows that rank 0 has under `handle`: `num_rows` of equal length, in the model's dtype. Steps
    behind this message may name them. Nobody answers."""

    handle: int
    num_rows: int
    rows: bytes


class RankDrop(msgspec.Struct, frozen=True):
    """Media to forget after the steps before it. Nobody answers."""

    handles: tuple[int, ...]


class RankMoved(msgspec.Struct, frozen=True):
    """The end of a move; see `MoveOutcome`."""

    ticket: int
    lost: IntArray
    seconds: float


class RankReply(msgspec.Struct, frozen=True):
    """The end of a start or an operation. error: its message, empty for success. at_fault: the
    engine, its settings, or a request. computes_with: version and kernels of the rank,
    after a start."""

    error: str = ""
    at_fault: Literal["engine", "settings", "request"] = "engine"
    recovery_costs: RecoveryCosts | None = None
    computes_with: str = ""


def computes_with(report: Report) -> str:
    """Describe what must be equal on all ranks: version and kernels. report: a worker's report."""
    return f"quire {quire.__version__}, {report.kernels}"
