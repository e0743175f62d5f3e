"""A subscriber of KV events, after vLLM's published schema alone: it imports nothing of quire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Mirror", "Subscriber"]

END = b"\xff" * 8
WAIT_MS = 120_000


class Mirror:
    """A router's view of one engine. held: (medium, group, hash) of each block."""

    def __init__(self) -> None:
        self.held: set[tuple[str, int, int]] = set()
        self.lengths: dict[int, int] = {}
        self.kinds: dict[int, tuple[str, int | None]] = {}
        self._next: dict[tuple[int, Any, tuple[int, ...], Any], int] = {}

    def apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.held.clear()
            return
        medium, group = event["medium"], event["group_idx"]
        if kind == "BlockRemoved":
            for each in event["block_hashes"]:
                self.held.remove((medium, group, each))
            return
        assert kind == "BlockStored" and event["lora_id"] is None
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        hashes = event["block_hashes"]
        self.lengths[group] = size
        self.kinds[group] = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        assert len(tokens) in (0, size * len(hashes))
        keys = event.get("extra_keys") or [None] * len(hashes)
        assert len(keys) == len(hashes)
        for index, (each, extra) in enumerate(zip(hashes, keys, strict=True)):
            block = (medium, group, each)
            assert block not in self.held, "a block was told of twice"
            self.held.add(block)
            if tokens:
                part = tuple(tokens[index * size : (index + 1) * size])
                extra = None if extra is None else tuple(extra)
                self._next[group, parent, part, extra] = each
            parent = each

    def hashes(self, medium: str = "GPU", group: int = 0) -> set[int]:
        return {each for where, of, each in self.held if (where, of) == (medium, group)}

    def predict(
        self,
        tokens: Sequence[int],
        *,
        media: Sequence[str] = ("GPU",),
        salt: str | None = None,
        adapter: str | None = None,
        group: int = 0,
    ) -> int:
        """Tokens of a prompt that a group's blocks hold, its last token excepted."""
        size, parent, found = self.lengths.get(group, 1), None, 0
        while found + size < len(tokens):
            keys = [*([adapter] if adapter else []), *([salt] if salt and not found else [])]
            part = tuple(tokens[found : found + size])
            block = self._next.get((group, parent, part, tuple(keys) or None))
            if block is None or not any((each, group, block) in self.held for each in media):
                break
            parent, found = block, found + size
        return found


class Subscriber:
    """Follows a publisher. A gap is asked for. Numbers that begin again, or a connection that was
    lost, mean another engine, and all is asked for.

    next_number: number of the batch that comes next. num_gaps, num_starts: counts of both.
    """

    def __init__(self, endpoint: str, replay: str | None, topic: str = "", hwm: int = 0) -> None:
        """hwm: messages that wait for this subscriber; 0: no limit."""
        self.mirror = Mirror()
        self.topic = topic.encode()
        self.next_number = self.num_gaps = self.num_starts = 0
        self.rank: int | None = None
        self._seen: set[bytes] = set()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, hwm)
        if hwm:
            self._sub.setsockopt(zmq.RCVBUF, 4096)
        self._sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        changes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._changes = self._sub.get_monitor_socket(changes)
        self._was_lost = False
        self._sub.connect(endpoint)
        self._replay = replay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def ask(self, number: int) -> list[tuple[int, bytes]]:
        """Past batches from a number on."""
        assert self._replay is not None
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay)
            dealer.send_multipart([b"", number.to_bytes(8, "big")])
            while dealer.poll(WAIT_MS):
                empty, topic, of, payload = dealer.recv_multipart()
                assert empty == b""
                if of == END:
                    assert payload == b""
                    return found
                assert topic == self.topic
                found.append((int.from_bytes(of, "big"), payload))
        raise AssertionError("no replay")

    def poll(self, timeout_ms: int = 100) -> None:
        """Take what has come."""
        while self._sub.poll(timeout_ms):
            topic, number, payload = self._sub.recv_multipart()
            assert topic == self.topic
            self._watch_connection()
            self._take(int.from_bytes(number, "big"), payload)
        self._watch_connection()

    def _watch_connection(self) -> None:
        while self._changes.poll(0):
            if recv_monitor_message(self._changes)["event"] == zmq.EVENT_DISCONNECTED:
                self._was_lost = True
            elif self._was_lost:
                self._was_lost = False
                self.num_starts += 1
                self._begin()
                self.sync()

    def catch_up(self) -> None:
        """Ask for all that is kept: at the start, and when the connection was lost."""
        self.poll(0)
        self._begin()
        self.sync()

    def sync(self) -> None:
        """Ask for what has been sent and has not come yet; it may come again."""
        for each in self.ask(self.next_number):
            self._apply(*each)

    def _begin(self) -> None:
        self.mirror, self.next_number = Mirror(), 0

    def _take(self, number: int, payload: bytes) -> None:
        if payload in self._seen:
            return
        if number < self.next_number:
            self._begin()
            self.num_starts += 1
        if number > self.next_number and self._replay is not None:
            self.num_gaps += 1
            self.sync()
        if number >= self.next_number:
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        _, events, self.rank = msgspec.msgpack.decode(payload)
        if number != self.next_number and events[0]["type"] != "AllBlocksCleared":
            return  # what lies between is lost: the whole state follows
        for event in events:
            self.mirror.apply(event)
        self._seen.add(payload)
        self.next_number = number + 1
