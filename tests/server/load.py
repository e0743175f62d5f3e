"""Clients that misbehave, in number, against a server over loopback: the scenarios that the tests
run small and `benchmarks/serving/server_faults.py` large. Each is bounded in count and in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.entrypoints.bench.record import percentile
from tests.engine.fake_core_process import FakeCoreOptions
from tests.server.fake_serve import FakeServer, listening_sockets, members_of

CHAT = "/v1/chat/completions"
LIMIT_S = 120.0
"""An answer that is not complete by then has no ending."""

MOST_PROMPT_TOKENS = 64
"""Most tokens in the prompts of slow readers and of those beside them."""
MOST_TOKENS_PER_S = 30_000
"""Rate of a core at which it, the front and the clients have time to spare on two processors."""

Figures = dict[str, float]


@dataclass(slots=True)
class Reply:
    """data: all that came, head included. seconds: until it was complete or cut. has_failed: the
    connection was reset, or the end did not come in time."""

    data: bytes = b""
    seconds: float = 0.0
    was_cut: bool = False
    has_failed: bool = False

    @property
    def status(self) -> int:
        """0 if no answer came."""
        return int(self.data[9:12]) if self.data.startswith(b"HTTP/1.1 ") else 0

    @property
    def was_never_heard(self) -> bool:
        """The connection was reset before a byte came: a server that ends has not accepted it."""
        return self.has_failed and not self.data and self.seconds < LIMIT_S

    @property
    def ending(self) -> str:
        """One of done, error, refused (all as they should be), closed (no answer), broken."""
        data = self.data
        if not data:
            return "broken" if self.has_failed else "closed"
        head, _, body = data.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head:
            found = re.search(rb"content-length: (\d+)", head)
            if found is None or len(body) != int(found[1]):
                return "broken"
            return "done" if self.status == 200 else "refused"
        if not body.endswith(b"\r\n0\r\n\r\n"):
            return "broken"
        is_done, is_error = b"data: [DONE]\n\n" in body, b'data: {"error":' in body
        if is_done == is_error:
            return "broken"
        return "done" if is_done else "error"

    @property
    def text(self) -> str:
        """The model's words, taken from the bytes that a client reads, samples in order."""
        body = self.data.partition(b"\r\n\r\n")[2]
        pieces: dict[int, str] = {}
        documents = re.findall(rb"data: (\{.*\})\n\n", body) or [body]
        for document in documents:
            for choice in json.loads(document)["choices"]:
                said = choice.get("delta") or choice.get("message") or {}
                index = choice["index"]
                pieces[index] = pieces.get(index, "") + (said.get("content") or "")
        return "\n".join(pieces[index] for index in sorted(pieces))


def chat_request(content: str, **fields: Any) -> bytes:
    """A chat of one message, greedy, on a connection of its own."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 1}
    text = json.dumps({**body, "ignore_eos": True, **fields}).encode()
    return raw(CHAT, text)


def raw(path: str, body: bytes = b"", method: str = "POST") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def exchange(port: int, request: bytes, *, cut_at: int | None = None) -> Reply:
    """Send, and read to the end, or leave for good once so many bytes have come."""
    reply, began = Reply(), time.monotonic()
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return reply
    try:
        async with asyncio.timeout(LIMIT_S):
            writer.write(request)
            while True:
                left = 65536 if cut_at is None else min(65536, cut_at - num_bytes)
                if left == 0:
                    reply.was_cut = True
                    break
                piece = await reader.read(left)
                if not piece:
                    break
                pieces.append(piece)
                num_bytes += len(piece)
    except (TimeoutError, ConnectionError):
        reply.has_failed = True
    finally:
        writer.transport.abort()
    reply.data = b"".join(pieces)
    reply.seconds = time.monotonic() - began
    return reply


async def get_json(port: int, path: str) -> dict[str, Any]:
    reply = await exchange(port, raw(path, method="GET"))
    return json.loads(reply.data.partition(b"\r\n\r\n")[2])


async def until_ready(port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await exchange(port, raw("/readyz", method="GET"))).status != 200:
            await asyncio.sleep(0.02)


async def leftovers(port: int, wait_s: float = 60.0) -> Figures:
    """Return the resources that the server still holds, once it has had time to let go of them."""
    deadline = time.monotonic() + wait_s
    while True:
        load = await get_json(port, "/load")
        text = (await exchange(port, raw("/metrics", method="GET"))).data.decode()
        figures = {
            "open_requests": load["server_load"],
            "waiting_requests": float(load["waiting_requests"]),
            "running": _metric(text, "vllm:num_requests_running"),
            "used_blocks_share": _metric(text, "vllm:kv_cache_usage_perc"),
        }
        if not any(figures.values()) or time.monotonic() > deadline:
            return figures
        await asyncio.sleep(0.1)


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


# --- aborts ---------------------------------------------------------------------------------------


async def abort_storm(
    server: FakeServer, num_requests: int, concurrency: int, seed: int
) -> Figures:
    """Half of the clients leave after a random number of bytes of their answer. The other half must
    be told what they would be told alone."""
    rng = random.Random(seed)
    port = server.port
    requests = [
        chat_request(f"Say {i}.", max_tokens=4 + 5 * i, n=1 + i % 2, stream=i % 4 != 3)
        for i in range(8)
    ]
    alone = [await exchange(port, request) for request in requests]
    assert all(reply.ending == "done" for reply in alone), [reply.data for reply in alone]
    await leftovers(port)
    files_before, memory_before = server.num_files(), server.memory_bytes()
    outcomes: Counter[str] = Counter()
    left = iter(range(num_requests))

    async def client() -> None:
        for number in left:
            case = rng.randrange(len(requests))
            cut_at = rng.randrange(1, len(alone[case].data)) if number % 2 else None
            reply = await exchange(port, requests[case], cut_at=cut_at)
            if cut_at is not None:
                outcomes["cut" if reply.was_cut else reply.ending] += 1
            elif reply.ending != "done" or reply.text != alone[case].text:
                outcomes["wrong"] += 1
            else:
                outcomes["right"] += 1

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.monotonic() - began
    held = await leftovers(port)
    again = await exchange(port, requests[0])
    await _until_closed(server, files_before)
    return {
        "requests": num_requests,
        "requests_per_s": num_requests / seconds,
        "cut": outcomes["cut"],
        "right": outcomes["right"],
        "wrong": outcomes["wrong"],
        "serves_on": float(again.text == alone[0].text),
        "open_files_more": server.num_files() - files_before,
        "memory_mib_more": (server.memory_bytes() - memory_before) / 2**20,
        **held,
    }


async def _until_closed(server: FakeServer, num_files: int) -> None:
    """Wait until the server has as few files open as it had, or so long that others will stay."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S / 4):
            while server.num_files() > num_files:
                await asyncio.sleep(0.02)


# --- overload -------------------------------------------------------------------------------------


async def overload(server: FakeServer, factor: float, seconds: float, num_clients: int) -> Figures:
    """The peak first, from `num_clients` clients who each wait for their answer; then requests at
    `factor` times that rate, whatever becomes of them. They are at least `factor` for each client:
    a machine that stood still at the peak has none."""
    port, request = server.port, chat_request("Count.", max_tokens=20)
    completed: list[float] = []

    async def patient(until: float) -> None:
        while time.monotonic() < until:
            if (await exchange(port, request)).ending == "done":
                completed.append(time.monotonic())

    began = time.monotonic()
    await asyncio.gather(*(patient(began + seconds) for _ in range(num_clients)))
    peak = _rate(completed, began + seconds / 4, began + seconds)
    replies: list[tuple[float, Reply]] = []

    async def impatient() -> None:
        reply = await exchange(port, request)
        replies.append((time.monotonic(), reply))

    count = int(factor * max(peak * seconds, num_clients))
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(began + number * seconds / count - time.monotonic())
            group.create_task(impatient())
        offered_s = time.monotonic() - began
    done = [when for when, reply in replies if reply.ending == "done"]
    rejected = [reply for _, reply in replies if reply.status == 503]
    goodput = _rate(done, began + offered_s / 4, began + offered_s)
    held = await leftovers(port)
    return {
        "peak_per_s": peak,
        "offered_per_s": len(replies) / offered_s,
        "goodput_per_s": goodput,
        "goodput_share": goodput / peak if peak else math.nan,
        "done": len(done),
        "rejected": len(rejected),
        "rejected_without_retry_after": sum(b"retry-after: " not in r.data for r in rejected),
        "reject_p50_ms": 1000 * percentile([r.seconds for r in rejected], 50),
        "reject_p99_ms": 1000 * percentile([r.seconds for r in rejected], 99),
        "other_outcomes": len(replies) - len(done) - len(rejected),
        **held,
    }


def _rate(times: Sequence[float], since: float, until: float) -> float:
    return sum(since <= when <= until for when in times) / (until - since)


# --- shutdown -------------------------------------------------------------------------------------


async def shutdown_under_load(
    server: FakeServer, num_streams: int, delay_s: float, *, to_group: bool
) -> Figures:
    """Streams are open and others come when SIGTERM does, to the front or to all its processes.

    delay_s: before that; infinite: until the server has all the streams."""
    port = server.port
    listeners = listening_sockets(port)
    assert listeners, "the port of the server"
    requests = [chat_request(f"Say {i}.", max_tokens=40, stream=i % 4 != 3) for i in range(8)]
    tasks = [
        asyncio.create_task(exchange(port, requests[i % len(requests)])) for i in range(num_streams)
    ]
    await (_until_open(port, tasks) if math.isinf(delay_s) else asyncio.sleep(delay_s))
    send: Callable[[int, int], None] = os.killpg if to_group else os.kill
    send(server.process.pid, signal.SIGTERM)
    began = time.monotonic()
    late = [asyncio.create_task(exchange(port, request)) for request in requests]
    replies = await asyncio.gather(*tasks)
    late_replies = await asyncio.gather(*late)
    status = await asyncio.to_thread(server.process.wait, LIMIT_S)
    seconds = time.monotonic() - began
    endings = Counter(reply.ending for reply in replies)
    endings.update("closed" if each.was_never_heard else each.ending for each in late_replies)
    await _until_gone(server)
    return {
        "streams": len(replies) + len(late_replies),
        **{name: endings[name] for name in ("done", "error", "refused", "closed", "broken")},
        "exit_status": status,
        "exit_s": seconds,
        "left_processes": len(members_of(server.process.pid)),
        "left_files": len(list(server.directory.iterdir())),
        "left_port": float(bool(listeners & listening_sockets(port))),
    }


async def _until_open(port: int, streams: Sequence[asyncio.Task[Reply]]) -> None:
    """Wait until the server has, or has served, each of them."""
    num_open = -1.0
    async with asyncio.timeout(LIMIT_S):
        while sum(stream.done() for stream in streams) + num_open < len(streams):
            await asyncio.sleep(0.02)
            num_open = (await get_json(port, "/load"))["server_load"]


async def _until_gone(server: FakeServer) -> None:
    """Wait until no process is left, or so long that the others will stay."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S / 4):
            while members_of(server.process.pid):
                await asyncio.sleep(0.02)


# --- slow readers ---------------------------------------------------------------------------------


def _check_capacity(core: FakeCoreOptions, num_readers: int, max_tokens: int) -> None:
    """Or the others would wait for the core, and tell nothing about slow readers."""
    blocks_each = math.ceil((max_tokens + MOST_PROMPT_TOKENS) / core.block_size)
    wanted = {
        "max_num_seqs": (num_readers + 1, core.max_num_seqs),
        "max_num_batched_tokens": (num_readers + MOST_PROMPT_TOKENS, core.max_num_batched_tokens),
        "max_model_len": (max_tokens + MOST_PROMPT_TOKENS, core.max_model_len),
        "num_blocks": ((num_readers + 1) * blocks_each, core.num_blocks),
        "tokens per second": (num_readers, MOST_TOKENS_PER_S * core.step_s),
    }
    for name, (asked, given) in wanted.items():
        if asked > given:
            raise ValueError(
                f"{num_readers} slow readers of {max_tokens} tokens need {name} of {asked} (of "
                f"tokens per second: in a step), but the core has {given:g}. Ask for less."
            )


async def slow_readers(
    server: FakeServer, num_readers: int, max_tokens: int, seconds: float
) -> Figures:
    """They ask for long streams and take a few bytes a second, or none; others are served on.

    ValueError if the core could not serve all of them and one more at once."""
    _check_capacity(server.core, num_readers, max_tokens)
    port, loop = server.port, asyncio.get_running_loop()
    other = chat_request("Say something short.", max_tokens=5)
    await exchange(port, other)
    await leftovers(port)
    memory_before = server.memory_bytes()
    connections: list[socket.socket] = []
    for number in range(num_readers):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        connections.append(connection)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        request = chat_request(f"Say {number}.", max_tokens=max_tokens, stream=True)
        await loop.sock_sendall(connection, request)
    most, others, until = 0, list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        reply = await exchange(port, other)
        assert reply.ending == "done", reply.data
        others.append(reply.seconds)
        for connection in connections[::2]:
            _take(connection, 64)
        most = max(most, server.memory_bytes())
        await asyncio.sleep(0.05)
    for connection in connections:
        connection.close()
    held = await leftovers(port)
    return {
        "readers": num_readers,
        "tokens_each": max_tokens,
        "memory_mib_more": (most - memory_before) / 2**20,
        "others_p99_ms": 1000 * percentile(others, 99),
        **held,
    }


def _take(connection: socket.socket, num_bytes: int) -> None:
    with contextlib.suppress(OSError):
        connection.recv(num_bytes)
