"""One connection of a client to one core, from its `Hello` to the death of the core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from quire.engine.core.socket import core_address
from quire.protocol.codec import Codec, encode
from quire.protocol.messages import PROTOCOL_VERSION, ClientMessage, CoreMessage, Goodbye, Hello

__all__ = ["CoreConnection"]

RECONNECT_MS = 20
GOODBYE_LINGER_MS = 200
MAX_MESSAGES_AT_ONCE = 256


class CoreConnection:
    """Waits until there is a core to connect to; ends when that core goes."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        directory: Path,
        client_id: int,
        on_message: Callable[[CoreMessage], None],
        on_pause: Callable[[], None],
    ) -> None:
        """on_message: called in the event loop. What it raises ends `run`, as a message does that
        cannot be read (GarbledMessageError). on_pause: called after all messages that were there,
        so that who reads slower than the core computes gets several steps at once."""
        self._codec: Codec[CoreMessage] = Codec(CoreMessage)
        self._on_message = on_message
        self._on_pause = on_pause
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by how many requests are admitted
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(core_address(directory))
        self.send(Hello(PROTOCOL_VERSION, client_id))

    def send(self, message: ClientMessage) -> int:
        """Send without waiting; the size in bytes. Raises TypeError as `encode` does."""
        return self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> int:
        self._socket.send(data)
        return len(data)

    async def run(self) -> None:
        """Hand out messages until the core is gone, the last ones that it sent included."""
        gone = asyncio.ensure_future(self._wait_until_gone())
        received = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((received, gone), return_when=asyncio.FIRST_COMPLETED)
            if received.done():
                received.result()  # endless, so this raises
        finally:
            gone.cancel()
            received.cancel()
            await asyncio.gather(gone, received, return_exceptions=True)
        with contextlib.suppress(zmq.Again):
            while True:
                await self._take_messages(await self._socket.recv(zmq.NOBLOCK))

    async def _receive(self) -> None:
        while True:
            await self._take_messages(await self._socket.recv())
            await asyncio.sleep(0)  # others go on, even if there is always another message

    async def _take_messages(self, first: bytes) -> None:
        """Hand out this message and the ones that wait behind it."""
        try:
            self._on_message(self._codec.decode(first))
            for _ in range(MAX_MESSAGES_AT_ONCE):
                self._on_message(self._codec.decode(await self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        finally:
            self._on_pause()

    async def _wait_until_gone(self) -> None:
        while True:
            frames: list[bytes] = await self._monitor.recv_multipart()
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                return

    def close(self, *, say_goodbye: bool) -> None:
        if say_goodbye:
            self._socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
            self.send(Goodbye())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
