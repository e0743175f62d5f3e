"""Costs of the page: 64 streams with three viewers, and without any, by turns.

    python -m benchmarks.serving.page_viewers [--seconds 600] [--turns 9] [--output FILE]

`quire serve` runs the bundled model. Each turn has a part without viewers and a part with them, in
changing order, and gives processor seconds of the server's processes for each token. Viewers are
pages in headless Chromium (Playwright), which stay open while others look; after each turn a
collection of garbage shows what their heap keeps. The memory of the server and these heaps are
flat if the last third of the turns has no more than the second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from benchmarks.arguments import command_line, positive_number
from tools.page_pictures import opened_browser, opened_page

from quire.platform.processes import state_of

PROMPT_WORDS, ANSWER_TOKENS = 40, 200
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a turn. cpu_s: processor time of the server's processes."""

    viewers: int
    tokens: int
    cpu_s: float
    wall_s: float

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_s / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """resident_mib: memory of the server's processes after it. heap_mib: heaps of the viewers."""

    without: Part
    looked: Part
    resident_mib: float
    heap_mib: tuple[float, ...]


@contextlib.contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Start a server on a free port; give its address and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire.cli.main", "serve", "--port", str(port)]
    quiet = ["--disable-access-log", "--disable-log-stats"]
    process = subprocess.Popen([*command, *quiet], stdout=subprocess.DEVNULL)
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


def tree_of(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for parent in found:
        tasks = Path(f"/proc/{parent}/task")
        with contextlib.suppress(OSError):
            for task in tasks.iterdir():
                found += [int(each) for each in (task / "children").read_text().split()]
    return found


def usage_of(pid: int) -> tuple[float, float]:
    """Return processor seconds and resident MiB of a server's processes."""
    states = [state_of(each) for each in tree_of(pid)]
    return (
        sum(state.cpu_seconds for state in states),
        sum(state.resident_bytes for state in states) / 2**20,
    )


async def load(url: str, streams: int, seconds: float) -> int:
    """Keep `streams` answers going, and return their tokens."""
    until = time.monotonic() + seconds

    async def one(http: httpx.AsyncClient, number: int) -> int:
        tokens = 0
        while time.monotonic() < until:
            text = " ".join(f"word{(number * 7 + i) % 97}" for i in range(PROMPT_WORDS))
            async for chunk in _chunks(http, url, text):
                usage: dict[str, int] | None = chunk.get("usage")
                tokens += usage["completion_tokens"] if usage else 0
        return tokens

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
        return sum(await asyncio.gather(*(one(http, number) for number in range(streams))))


async def _chunks(http: httpx.AsyncClient, url: str, text: str) -> AsyncIterator[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"The server refused a request: {(await reply.aread())[:300]!r}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def measure(url: str, pid: int, streams: int, seconds: float, viewers: int) -> Part:
    """Run a part. The load is in a process of its own, since Playwright holds this one's loop."""
    script = f"import asyncio; from {__spec__.name} import load; "
    script += f"print(asyncio.run(load({url!r}, {streams}, {seconds})))"
    before, started = usage_of(pid)[0], time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The load failed: {done.stderr[-500:]}")
    wall_s = time.monotonic() - started
    return Part(viewers, int(done.stdout), usage_of(pid)[0] - before, round(wall_s, 2))


def heap_mib(page: Any) -> float:
    """Return the heap of a page after a collection of garbage."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return round(used / 2**20, 2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    part_s = options.seconds / options.turns / 2
    turns: list[Turn] = []
    with served() as (url, pid), opened_browser() as browser:
        pages = [opened_page(browser, (1280, 800), "light") for _ in range(options.viewers)]
        measure(url, pid, options.streams, min(5.0, part_s), 0)  # warms up
        for number in range(options.turns):
            parts: dict[bool, Part] = {}
            heap: tuple[float, ...] = ()
            for is_looked in (number % 2 == 0, number % 2 == 1):
                for page in pages:
                    page.goto(f"{url}/ui#engine" if is_looked else "about:blank")
                    if is_looked:
                        page.wait_for_selector(".legend li")
                viewers = options.viewers if is_looked else 0
                parts[is_looked] = measure(url, pid, options.streams, part_s, viewers)
                if is_looked:
                    heap = tuple(map(heap_mib, pages))
            turns.append(Turn(parts[False], parts[True], round(usage_of(pid)[1], 1), heap))
            sys.stderr.write(f"turn {number + 1}: {ratio_of(turns[-1]):.3f}\n")
    return result_of(turns, options)


def ratio_of(turn: Turn) -> float:
    """Return processor time per token with viewers, beside that without."""
    return turn.looked.cpu_us_per_token / turn.without.cpu_us_per_token


def result_of(turns: list[Turn], options: argparse.Namespace) -> dict[str, Any]:
    third = max(1, len(turns) // 3)
    heaps = [max(turn.heap_mib, default=0.0) for turn in turns]
    memory = [turn.resident_mib for turn in turns]
    return {
        "command": command_line(),
        "streams": options.streams,
        "viewers": options.viewers,
        "seconds": options.seconds,
        "cpu_ratio_median": round(statistics.median(map(ratio_of, turns)), 4),
        "cpu_us_per_token_without": round(
            statistics.median(turn.without.cpu_us_per_token for turn in turns), 1
        ),
        "heap_growth_mib": round(max(heaps[-third:]) - max(heaps[:-third] or heaps), 2),
        "memory_growth_mib": round(max(memory[-third:]) - max(memory[:-third] or memory), 1),
        "load_average": os.getloadavg(),
        "turns": [{**asdict(turn), "ratio": round(ratio_of(turn), 4)} for turn in turns],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=positive_number, default=600, help="of all turns")
    parser.add_argument("--turns", type=positive_number, default=9)
    parser.add_argument("--streams", type=positive_number, default=64)
    parser.add_argument("--viewers", type=positive_number, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    result = run(options)
    text = json.dumps(result, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
