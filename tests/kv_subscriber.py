"""A subscriber of KV events, after vLLM's published schema alone: it imports nothing of quire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq

__all__ = ["Mirror", "Subscriber"]

END = b"\xff" * 8


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
    """Follows a publisher. A gap is asked for; numbers that begin again are another engine's.

    next_number: number of the batch that comes next. num_gaps, num_starts: counts of both.
    """

    def __init__(self, endpoint: str, replay: str | None, topic: str = "", hwm: int = 0) -> None:
        """hwm: messages that wait for this subscriber; 0: no limit."""
        self.mirror = Mirror()
        self.topic = topic.encode()
        self.next_number = self.num_gaps = self.num_starts = 0
        self.rank: int | None = None
        self._seen: dict[int, bytes] = {}
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, hwm)
        if hwm:
            self._sub.setsockopt(zmq.RCVBUF, 4096)
        self._sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._sub.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if replay is not None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.connect(replay)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, number: int) -> list[tuple[int, bytes]]:
        """Past batches from a number on."""
        assert self._replay is not None
        self._replay.send_multipart([b"", number.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while self._replay.poll(60_000):
            empty, topic, of, payload = self._replay.recv_multipart()
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
            self._take(int.from_bytes(number, "big"), payload)

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
        self._seen.clear()

    def _take(self, number: int, payload: bytes) -> None:
        if self._seen.get(number) == payload:
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
        self._seen[number] = payload
        self.next_number = number + 1
