"""Sends KV events to subscribers, and past ones to those who ask: PUB and ROUTER, as vLLM does."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from quire.base.errors import ConfigError
from quire.base.telemetry.kv_events import AllBlocksCleared, KVEvent, KVEventBatch, KVEventsSettings
from quire.plan.kv_cache.events import EventLog

__all__ = ["EventPublisher"]

logger = logging.getLogger("quire")

LINGER_MS = 500
END_OF_REPLAY = b"\xff" * 8
"""Sequence number -1."""

MAX_REQUEST_BYTES = 256

MAX_PAST_BYTES = 256 * 2**20
"""Size of the past batches that are kept, however few they are."""


class EventPublisher:
    """A thread that owns the sockets. `tell` never waits: batches that the queue has no room for
    are dropped and counted, and the next one that finds room holds the whole state instead.

    Messages are [topic, sequence number, batch]. A request for a replay is [empty, number of the
    first batch]; each answer is [empty, topic, number, batch], and the last one has the number -1.
    """

    def __init__(self, settings: KVEventsSettings, rank: int = 0) -> None:
        """rank: number of the replica. Raises ConfigError if an address can't be used."""
        settings = settings.of_replica(rank)
        self._rank = rank
        self._max_waiting = settings.max_queue_size
        self._waiting = deque[tuple[float, list[KVEvent]]]()
        self._max_past = settings.buffer_steps
        self._past = deque[tuple[int, bytes]]()
        self._past_bytes = 0
        self._last_whole = 0
        self._topic = settings.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._is_behind = False
        self._wants_all = threading.Event()
        self._is_closing = False
        self._num_dropped = self._num_sent = 0
        self._woken_fd, self._wake_fd = os.pipe()
        for each in (self._woken_fd, self._wake_fd):
            os.set_blocking(each, False)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        try:
            self._pub = self._open(zmq.PUB, settings.hwm, "endpoint", settings.endpoint)
            self._router = None
            if settings.replay_endpoint is not None:
                address = settings.replay_endpoint
                # The library notes what was read when half of the limit has been.
                hwm = min(2 * (settings.buffer_steps + 2), 2**31 - 1)
                self._router = self._open(zmq.ROUTER, hwm, "replay_endpoint", address)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, hwm: int, name: str, address: str) -> zmq.Socket[bytes]:
        """Bind a socket, or connect that of the events where the address names a host, as vLLM
        does."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, hwm)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if "::" in address or "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        is_bound = name != "endpoint" or address.startswith("ipc:")
        try:
            if is_bound or "*" in address or "::" in address:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config has {name}={address!r}, which cannot be used ({error}). Give an "
                "address that is free."
            ) from error
        return socket

    # --- the engine's thread -------------------------------------------------------------------

    def tell(self, log: EventLog) -> None:
        """Queue the events that a log has."""
        if len(self._waiting) >= self._max_waiting:
            dropped = log.take()
            self._num_dropped += len(dropped)
            self._is_behind |= bool(dropped)
            return
        if self._is_behind or self._wants_all.is_set():
            self._wants_all.clear()
            self._is_behind = False
            events = log.take_all()
        else:
            events = log.take()
        if events:
            self._waiting.append((time.time(), events))
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is woken anyway
            os.write(self._wake_fd, b"1")

    def stats(self) -> Mapping[str, Any]:
        """Return the fields of `EngineStats` on events."""
        return {
            "kv_event_batches_total": self._num_sent,
            "kv_events_dropped_total": self._num_dropped,
        }

    def close(self) -> None:
        """Send what waits, and free the addresses; once."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._free()

    def _free(self) -> None:
        self._context.destroy()
        os.close(self._woken_fd)
        os.close(self._wake_fd)

    # --- the thread of the sockets -------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not (self._is_closing and not self._waiting):
            if not self._waiting:
                ready = dict(poller.poll())
                if self._woken_fd in ready:
                    os.read(self._woken_fd, 4096)
            try:
                self._send()
                self._replay()
            except zmq.ZMQError as error:
                logger.warning("KV events could not be sent: %s", error)

    def _send(self) -> None:
        """Send what waits. A subscriber that is slow loses messages, and sees that by their
        numbers."""
        while self._waiting:
            at, events = self._waiting.popleft()
            payload = self._encoder.encode(KVEventBatch(at, events, self._rank))
            number = self._num_sent
            self._num_sent += 1
            if events and isinstance(events[0], AllBlocksCleared):
                self._last_whole = number
            self._keep(number, payload)
            self._pub.send_multipart([self._topic, _bytes_of(number), payload])

    def _keep(self, number: int, payload: bytes) -> None:
        """Add a batch to the past, and forget the oldest ones beyond what is kept."""
        self._past.append((number, payload))
        self._past_bytes += len(payload)
        while len(self._past) > self._max_past or self._past_bytes > MAX_PAST_BYTES:
            self._past_bytes -= len(self._past.popleft()[1])

    def _replay(self) -> None:
        """Answer a request, if one has come. If it begins before the past that is kept, and no
        batch that is kept begins with a cleared state, the next batch holds the whole state."""
        router = self._router
        if router is None or not router.poll(0):
            return
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("a request for a replay of KV events was not understood")
            return
        peer, first = frames[0], int.from_bytes(frames[2], "big")
        oldest = self._num_sent - len(self._past)
        if first < oldest and self._last_whole < oldest:
            self._wants_all.set()
        for number, payload in self._past:
            if number >= first:
                router.send_multipart([peer, b"", self._topic, _bytes_of(number), payload])
        router.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(8, "big")
