"""A server under a load of streams, and the processor time that its processes take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quire.base.platform.processes import state_of

PROMPT_WORDS, ANSWER_TOKENS = 40, 200
PATIENCE_S = 120.0
SERVE = ("-m", "quire.entrypoints.cli.main", "serve", "--disable-access-log", "--disable-log-stats")
"""Arguments of Python that serve the bundled model."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a turn. cpu_s: processor time of the server's processes."""

    tokens: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_s / max(self.tokens, 1)


@contextlib.contextmanager
def served(command: Sequence[str] = SERVE) -> Iterator[tuple[str, int]]:
    """Start a server on a free port; give its address and process. command: arguments of Python,
    before the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)], stdout=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The server did not start.")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def usage_of(pid: int) -> tuple[float, float]:
    """Return processor seconds and resident MiB of a server's processes."""
    states = [state_of(each) for each in _tree_of(pid)]
    return (
        sum(state.cpu_seconds for state in states),
        sum(state.resident_bytes for state in states) / 2**20,
    )


def _tree_of(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for parent in found:
        tasks = Path(f"/proc/{parent}/task")
        with contextlib.suppress(OSError):
            for task in tasks.iterdir():
                found += [int(each) for each in (task / "children").read_text().split()]
    return found


def measure(
    url: str, pid: int, streams: int, seconds: float, body: Mapping[str, Any] | None = None
) -> Part:
    """Run a part. The load is in a process of its own, so that it shares no loop with the caller.
    body: further fields of each request."""
    script = f"import asyncio; from {__spec__.name} import load; "
    script += f"print(asyncio.run(load({url!r}, {streams}, {seconds}, {dict(body or {})!r})))"
    before, started = usage_of(pid)[0], time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The load failed: {done.stderr[-500:]}")
    wall_s = time.monotonic() - started
    return Part(int(done.stdout), usage_of(pid)[0] - before, round(wall_s, 2))


async def load(url: str, streams: int, seconds: float, more: Mapping[str, Any]) -> int:
    """Keep `streams` answers going, and return their tokens. more: further fields of requests."""
    until = time.monotonic() + seconds

    async def one(http: httpx.AsyncClient, number: int) -> int:
        tokens = 0
        while time.monotonic() < until:
            text = " ".join(f"word{(number * 7 + i) % 97}" for i in range(PROMPT_WORDS))
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
            async for chunk in _chunks(http, url, body):
                usage: dict[str, int] | None = chunk.get("usage")
                tokens += usage["completion_tokens"] if usage else 0
        return tokens

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
        return sum(await asyncio.gather(*(one(http, number) for number in range(streams))))


async def _chunks(
    http: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"The server refused a request: {(await reply.aread())[:300]!r}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
