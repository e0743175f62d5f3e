"""The core's end of the sockets to its clients: bytes in, bytes out, nobody waits for anybody."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import zmq

__all__ = ["CoreSocket", "core_address"]

SEND_QUEUE_MESSAGES = 1000
RETRY_MS = 10
LINGER_MS = 500


def core_address(directory: Path) -> str:
    return f"ipc://{directory}/core"


class CoreSocket:
    """Sends and receives messages of peers, which are known by the identity that the socket library
    gave their connection. A peer that does not read holds nobody up: its messages are kept until it
    does. Their size is bounded by what its open requests may still produce, since it cannot send
    new ones meanwhile."""

    def __init__(
        self, directory: Path, wakeup_fd: int, queue_messages: int = SEND_QUEUE_MESSAGES
    ) -> None:
        """wakeup_fd: a non-blocking file; `wait` ends when something is written to it."""
        self._wakeup_fd = wakeup_fd
        self._woken_fd, self._wake_fd = os.pipe()
        for each in (self._woken_fd, self._wake_fd):
            os.set_blocking(each, False)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, queue_messages)
        self._socket.bind(core_address(directory))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(wakeup_fd, zmq.POLLIN)
        self._poller.register(self._woken_fd, zmq.POLLIN)
        self._owed: dict[bytes, deque[bytes]] = {}

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """(peer, message) of all that has arrived, without waiting."""
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 1:
                yield peer, frames[0]
            else:
                yield peer, b""  # no message at all: refused like any other garbled one

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until a message arrives, or the wakeup file can be read, or the time is over."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        ready = dict(self._poller.poll(RETRY_MS if self._owed else timeout_ms))
        for each in (self._wakeup_fd, self._woken_fd):
            if each in ready:
                os.read(each, 4096)

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        with contextlib.suppress(OSError):  # full: it ends anyway; closed: nobody waits
            os.write(self._wake_fd, b"1")

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is gone; what it was owed is dropped then."""
        owed = self._owed.get(peer)
        if owed is not None:
            owed.append(message)
            return True
        return self._try_send(peer, message)

    def is_owed(self, peer: bytes) -> bool:
        """Return whether the peer, as far as is known, has not read everything sent to it."""
        return peer in self._owed

    def send_owed(self) -> list[bytes]:
        """Retry pending messages of slow peers. Return the peers that turn out to be gone."""
        gone: list[bytes] = []
        for peer in list(self._owed):
            owed = self._owed.pop(peer)
            while owed and peer not in self._owed:
                message = owed.popleft()
                if not self._try_send(peer, message):
                    gone.append(peer)
                    break
            else:
                if owed:
                    self._owed[peer].extend(owed)
        return gone

    def forget(self, peer: bytes) -> None:
        """Drop what the peer is owed."""
        self._owed.pop(peer, None)

    def _try_send(self, peer: bytes, message: bytes) -> bool:
        try:
            self._socket.send_multipart((peer, message), zmq.NOBLOCK)
        except zmq.Again:
            self._owed[peer] = deque((message,))
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the socket after a moment for sent messages to leave."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()
        for each in (self._woken_fd, self._wake_fd):
            os.close(each)
