"""A server over a disk under load that is killed at random moments: each stream of a core that is
killed ends, with the tokens that a server in peace gives, and nothing is left behind.

Two kills hit the core, the third one all processes of the server, and another server goes on with
the folder. More kills of one server's cores would wait longer and longer (`RestartPolicy`).

A soak kills 200 times (`QUIRE_SOAK=20`). `QUIRE_KILLS` gives another number, and `QUIRE_SEED`
chooses the moments; `make soak` passes it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from quire.config.kv_disk.folder import KVFolder
from quire.plan.kv_cache.disk_index import DiskIndex
from tests import waiting
from tests.profiles import SCALE
from tests.server.test_kv_disk import metric, serving
from tests.server.test_run import Serving, children
from tests.waiting import wait_for

NUM_KILLS = int(os.environ.get("QUIRE_KILLS", 3 if SCALE == 1 else 10 * SCALE))
SEED = int(os.environ.get("QUIRE_SEED", "0"))
NUM_CLIENTS, NUM_PROMPTS, NEW_TOKENS = 4, 16, 24
KILLS_PER_SERVER = 3
"""Kills of a core, but for the last one. Its supervisor restarts two of them within half a
second."""

LIMIT = 12_000_000
"""Room for half of the prompts' blocks."""
FLAGS = ("--num-kv-blocks", "120", "--max-model-len", "1024", "--kv-disk-bytes", str(LIMIT))
MAX_SECONDS = 1.5


def prompt(index: int) -> list[int]:
    """Four families of prompts, each of which begins in the same way."""
    shared = np.random.default_rng(index // 4).integers(5, 900, 200).tolist()
    return [*shared, *np.random.default_rng(100 + index).integers(5, 900, 150).tolist()]


def body_of(index: int) -> dict[str, Any]:
    return {
        "prompt": prompt(index),
        "max_tokens": NEW_TOKENS,
        "seed": index,
        "temperature": 0.7,
        "ignore_eos": True,
        "stream": True,
    }


def answer(http: httpx.Client, index: int) -> str | None:
    """The text of a stream, or None if it ends with an error that says so."""
    pieces: list[str] = []
    with http.stream("POST", "/v1/completions", json=body_of(index)) as response:
        if response.status_code != 200:
            assert json.loads(response.read())["error"]["message"]
            return None
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return "".join(pieces)
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return None
                pieces += [choice["text"] for choice in event["choices"]]
    raise AssertionError("a stream has no ending")


class Clients:
    """Threads that ask for prompts until told to stop, and what they got. A stream may be cut by
    the end of the whole server, and by nothing else (`is_cut`)."""

    def __init__(
        self, http: httpx.Client, expected: list[str], counts: Counter[str], seed: int
    ) -> None:
        self.counts = counts
        self.faults: list[str] = []
        self.is_cut = False
        self._http, self._expected = http, expected
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(100 * seed + i),))
            for i in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            index = rng.randrange(NUM_PROMPTS)
            try:
                found = answer(self._http, index)
            except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
                if self.is_cut and isinstance(error, httpx.TransportError):
                    self.counts["cut"] += 1
                    return
                self.faults.append(f"prompt {index}: {error!r}")
                continue
            if found is not None and found != self._expected[index]:
                self.faults.append(f"prompt {index}: {found!r} is wrong")
            self.counts["refused" if found is None else "answered"] += 1
            if found is None:
                self._stop.wait(0.05)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(waiting.WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a stream has no ending"


def num_held(url: str) -> float:
    """Tokens and blocks that requests hold."""
    return metric(url, "kv_tokens") + waiting.get(f"{url}/cache").json()["used"]


def check_files(folder: Path) -> None:
    """The limit holds, and every block of the index is a whole chain."""
    for files, header in KVFolder(folder).stores():
        assert files.num_bytes <= LIMIT
        DiskIndex(header.num_slots, files.read_records(header)).check_invariants()


def kill_core(server: Serving, http: httpx.Client) -> None:
    (core,) = wait_for(lambda: children(server.process.pid), "a core")
    os.kill(int(core), signal.SIGKILL)
    wait_for(lambda: core not in children(server.process.pid), "the end of the core")
    wait_for(lambda: answer(http, 0) is not None, "an answer of another core")


def kill_server(server: Serving, clients: Clients) -> None:
    clients.is_cut = True
    os.killpg(server.process.pid, signal.SIGKILL)
    clients.end()
    server.end()


def test_kills_under_load(
    short_tmp: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with serving(short_tmp, tmp_path / "plain", *FLAGS) as server:
        url = server.wait_until_ready()
        with waiting.PatientClient(base_url=url) as http:
            expected = [answer(http, index) or "" for index in range(NUM_PROMPTS)]
    assert all(expected)
    rng, disk = random.Random(SEED), tmp_path / "kv"
    counts, loaded, seconds = Counter[str](), 0.0, list[float]()
    while len(seconds) < NUM_KILLS:
        with serving(short_tmp, disk, *FLAGS) as server:
            http = waiting.PatientClient(base_url=(url := server.wait_until_ready()))
            clients = Clients(http, expected, counts, SEED + len(seconds))
            try:
                for number in range(KILLS_PER_SERVER):
                    started = time.monotonic()
                    time.sleep(rng.random() * MAX_SECONDS)  # a moment, not a state to wait for
                    loaded += metric(url, "kv_blocks_loaded")
                    if number == KILLS_PER_SERVER - 1:
                        kill_server(server, clients)
                    else:
                        kill_core(server, http)
                    check_files(disk)
                    assert not clients.faults, clients.faults[:3]
                    seconds.append(time.monotonic() - started)
            finally:
                clients.end()
                http.close()
    answered = counts["answered"]
    assert answered > NUM_KILLS // 2 + NUM_CLIENTS
    with serving(short_tmp, disk, *FLAGS) as server:
        http = waiting.PatientClient(base_url=(url := server.wait_until_ready()))
        clients = Clients(http, expected, counts, SEED)
        try:
            wait_for(lambda: counts["answered"] > answered + NUM_CLIENTS, "answers")
        finally:
            clients.end()
        assert not clients.faults, clients.faults[:3]
        loaded += metric(url, "kv_blocks_loaded")
        assert loaded > 0, "nothing was ever read"
        wait_for(lambda: num_held(url) == 0, "free blocks")
        assert [answer(http, index) for index in range(NUM_PROMPTS)] == expected
        http.close()
    record_property("seed", SEED)
    record_property("kills", len(seconds))
    record_property("kills_of_servers", len(seconds) // KILLS_PER_SERVER)
    record_property("streams", dict(counts))
    record_property("blocks_loaded", loaded)
    record_property("slowest_kill_s", round(max(seconds), 1))
