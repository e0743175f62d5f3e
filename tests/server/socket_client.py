"""A client of WebSockets that shares nothing with the server's side of them."""

from __future__ import annotations

import json
import os
import socket
import struct
from types import TracebackType
from typing import Any, Self

from tests.waiting import WAIT_S

__all__ = ["SocketClient", "masked"]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def masked(opcode: int, data: bytes, *, first_bits: int = 0x80) -> bytes:
    """A frame of a client. first_bits: 0x80 for the last one of a message."""
    mask = os.urandom(4)
    body = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
    if len(data) < 126:
        size = struct.pack("!B", 0x80 | len(data))
    elif len(data) < 65536:
        size = struct.pack("!BH", 0x80 | 126, len(data))
    else:
        size = struct.pack("!BQ", 0x80 | 127, len(data))
    return bytes([first_bits | opcode]) + size + mask + body


class SocketClient:
    """status: status of the answer to the offer; head: all of its lines."""

    def __init__(self, port: int, *more: str, path: str = "/v1/responses") -> None:
        """more: lines of the request's head."""
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        lines = [
            f"GET {path} HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13", *more,
        ]  # fmt: skip
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._held = b""
        while b"\r\n\r\n" not in self._held:
            self._read()
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        self.head = head.decode().split("\r\n")
        self.status = int(self.head[0].split()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def _read(self) -> None:
        data = self._socket.recv(65536)
        assert data, f"the connection has ended after {self._held!r}"
        self._held += data

    def _take(self, count: int) -> bytes:
        while len(self._held) < count:
            self._read()
        data, self._held = self._held[:count], self._held[count:]
        return data

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self._socket.sendall(data)

    def say(self, message: Any) -> None:
        """A message: JSON."""
        self.send(masked(1, json.dumps(message).encode()))

    def frame(self) -> tuple[int, bytes]:
        """Opcode and data of the next frame of the server, which are whole and unmasked. Pings, of
        which a silent server sends some, are passed over."""
        first, size = self._take(2)
        assert first & 0xF0 == 0x80 and size < 128
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8))
        data = self._take(size)
        return self.frame() if first & 15 == 9 else (first & 15, data)

    def closing_code(self) -> int:
        """The reason of the server for the end, which comes next."""
        opcode, data = self.frame()
        assert opcode == 8
        assert not self._held and not self._socket.recv(1)
        return int.from_bytes(data)

    def turn(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of one response."""
        self.say({"type": "response.create", **fields})
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in ENDS:
            opcode, data = self.frame()
            assert opcode == 1
            events.append(json.loads(data))
        return events
