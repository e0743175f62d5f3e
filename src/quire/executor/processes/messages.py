"""Messages between an engine core and the processes that compute parts of its model.

Plans and late input have a layout of their own (`step_codec`); what is rare is a struct here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from quire.protocol.control import WorkerOp
from quire.protocol.recovery import RecoveryCosts

__all__ = ["RankLaunch", "RankMessage", "RankOp", "RankReply"]


class RankMessage(IntEnum):
    """Kinds of messages to all ranks."""

    PLAN = 1
    LATE = 2
    CONTROL = 3


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the process of a rank, on its standard input.

    settings: of `EngineSettings`, by name, with all that was measured. free_bytes, memory_bytes:
    of the host, as the core saw them, so that every rank makes the core's plan. region, ring,
    wakeup, replies: descriptors that the process inherits. `RankGroup` fills in the last five.
    """

    rank: int
    size: int
    settings: Mapping[str, str | int | float | bool | None]
    free_bytes: int
    memory_bytes: int
    parent_pid: int = 0
    region: int = -1
    ring: int = -1
    wakeup: int = -1
    replies: int = -1


class RankOp(msgspec.Struct, frozen=True):
    """An operation between steps; answered by `RankReply`."""

    op: WorkerOp


class RankReply(msgspec.Struct, frozen=True):
    """The end of a start, or of an operation. error: why it did not end well, empty if it did.
    is_config: whether the settings are at fault."""

    error: str = ""
    is_config: bool = False
    recovery_costs: RecoveryCosts | None = None
