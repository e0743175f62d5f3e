"""Messages between the process of rank 0 and those that hold the ranks of other hosts."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quire.compute.executor.processes.messages import RankLaunch

__all__ = ["HostHello", "HostLaunch", "HostMessage", "HostReply"]


class HostMessage(IntEnum):
    """Kinds of messages from a host. Messages to a host are for its ranks, with the numbers of
    `RankMessage`."""

    HELLO = 1
    REPLY = 2
    LOST = 3


class HostLaunch(msgspec.Struct, frozen=True):
    """The argument of a host's process. head, port: address on which the process of rank 0 listens.
    token: secret to send there. host: number of this host. ranks: ranks on this host. launch:
    launch of rank 0."""

    head: str
    port: int
    token: str
    host: int
    ranks: tuple[int, ...]
    launch: RankLaunch


class HostHello(msgspec.Struct, frozen=True):
    """The first message of a host. pid: id of its process."""

    token: str
    host: int
    pid: int


class HostReply(msgspec.Struct, frozen=True):
    """The answer of a rank. reply: an encoded `RankReply`."""

    rank: int
    reply: bytes
