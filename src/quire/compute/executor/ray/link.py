"""A connection between the processes of rank 0 and of another host.

A message is its length u32, its kind u8 and its bytes. Both sides send beats while they live, so
that silence means a lost host or network.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from typing import Final

from quire.base.errors import EngineLostError

__all__ = ["BEAT", "SILENT_S", "Link"]

BEAT: Final = 0
"""Kind of a beat, which only says that its sender lives."""
BEAT_S = 0.2
SILENT_S = 3.0
"""Seconds of silence after which a peer is lost."""

_HEADER = struct.Struct("<IB")


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        connected.settimeout(SILENT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._beat, name="quire-beats", daemon=True).start()

    @property
    def own_address(self) -> str:
        """The address of this host on the route to the peer."""
        return self._socket.getsockname()[0]

    def send(self, kind: int, message: bytes = b"") -> None:
        """Send a message. Raises EngineLostError if the peer no longer reads."""
        try:
            with self._lock:
                self._socket.sendall(_HEADER.pack(len(message), kind) + message)
        except OSError as error:
            raise EngineLostError(f"the connection is lost ({error})") from error

    def receive(self, most: int | None = None, within: float = math.inf) -> tuple[int, bytes]:
        """Wait for the next message that is no beat.

        Limits: this many bytes, and this many seconds if given. Raises EngineLostError if the peer
        ends, is silent or sends more.
        """
        deadline = time.monotonic() + within
        while True:
            length, kind = _HEADER.unpack(self._take(_HEADER.size, deadline))
            if most is not None and length > most:
                raise EngineLostError(f"a message of {length} bytes, where {most} are the most")
            message = self._take(length, deadline)
            if kind != BEAT:
                return kind, message

    def _take(self, count: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < count:
            if time.monotonic() > deadline:
                raise EngineLostError("the message did not come in time")
            try:
                part = self._socket.recv(count - len(found))
            except TimeoutError as error:
                raise EngineLostError(f"no sign of life for {SILENT_S} s") from error
            except OSError as error:
                raise EngineLostError(f"the connection is lost ({error})") from error
            if not part:
                raise EngineLostError("the connection was closed")
            found += part
        return bytes(found)

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            try:
                self.send(BEAT)
            except EngineLostError:
                return  # the thread that receives finds it out too

    def close(self) -> None:
        """Close the connection. May be called twice, and while another thread receives."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
