"""The process on a host that holds ranks: it starts them, passes messages of rank 0 on through a
ring of this host, and reports their answers and their end."""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from quire.base.errors import EngineError
from quire.compute.executor.processes.group import RankGroup
from quire.compute.executor.processes.messages import RankLaunch, RankMessage
from quire.compute.executor.ray.link import SILENT_S, Link
from quire.compute.executor.ray.messages import HostHello, HostLaunch, HostMessage, HostReply
from quire.protocol.codec import Codec, encode, read_exactly

__all__ = ["run_host"]

LAST_WORDS_S = 0.5


def run_host(encoded: bytes) -> str:
    """Serve until rank 0 or a rank of this host ends, and return why. encoded: a `HostLaunch`."""
    asked = Codec[HostLaunch](HostLaunch).decode(encoded)
    assert asked.launch.meeting is not None, "rank 0 says where ranks of several hosts meet"
    link = Link(socket.create_connection((asked.head, asked.port), timeout=SILENT_S))
    meeting = msgspec.structs.replace(asked.launch.meeting, address=link.own_address)
    try:
        link.send(HostMessage.HELLO, encode(HostHello(asked.token, asked.host, os.getpid())))
        launch = msgspec.structs.replace(asked.launch, meeting=meeting)
        return _Host(launch, asked.ranks, link).run()
    except EngineError as error:
        return str(error)
    finally:
        link.close()


class _Host:
    """Ranks of this host, and the connection to rank 0."""

    def __init__(self, launch: RankLaunch, ranks: tuple[int, ...], link: Link) -> None:
        self._link = link
        self._group = RankGroup(launch, self._tell_loss, ranks=ranks)
        self._forwarding: list[threading.Thread] = []

    def run(self) -> str:
        try:
            self._group.start()
            for rank, pipe in self._group.reply_pipes.items():
                thread = threading.Thread(target=self._forward, args=(rank, pipe), daemon=True)
                thread.start()
                self._forwarding.append(thread)
            self._group.serve()
            while True:
                kind, message = self._link.receive()
                self._group.send(RankMessage(kind), message)
        except EngineError as error:
            return str(error)
        finally:
            self._group.shutdown()
            for thread in self._forwarding:
                thread.join()
            self._group.close()

    def _forward(self, rank: int, pipe: int) -> None:
        try:
            while True:
                length = int.from_bytes(read_exactly(pipe, 4), "big")
                reply = HostReply(rank, read_exactly(pipe, length))
                self._link.send(HostMessage.REPLY, encode(reply))
        except (EOFError, OSError, EngineError):
            return  # the thread that watches or receives finds it out too

    def _tell_loss(self, reason: str) -> None:
        """Send the lost rank's own message, then that it has ended."""
        for thread in self._forwarding:
            thread.join(LAST_WORDS_S)
        try:
            self._link.send(HostMessage.LOST, reason.encode())
        finally:
            self._link.close()
