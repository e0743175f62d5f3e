"""A router's view of a server with replicas: the blocks that each of them has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests import waiting
from tests.kv_subscriber import Subscriber
from tests.server.test_kv_disk import ask, serving
from tests.waiting import wait_for

PROMPTS = np.random.default_rng(9).integers(5, 900, (8, 500)).tolist()


@contextmanager
def followed(
    folder: Path, *more: str, replicas: int = 1
) -> Iterator[tuple[str, int, list[Subscriber]]]:
    """A server's URL and process, and a subscriber of each of its replicas."""
    events, replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": events,
        "replay_endpoint": replay,
        "topic": "kv@test",
    }
    flags = ("--kv-events-config", json.dumps(config), "--num-kv-blocks", "100", *more)
    flags = (*flags, "--enable-engine-control")
    ends = ["", *(f"_dp{i}" for i in range(1, replicas))]
    subscribers = [Subscriber(events + end, replay + end, "kv@test") for end in ends]
    try:
        with serving(folder, folder / "kv", *flags) as server:
            yield server.wait_until_ready(), server.process.pid, subscribers
    finally:
        for each in subscribers:
            each.__exit__()


def agrees(url: str, subscribers: Sequence[Subscriber]) -> bool:
    """Return whether the subscribers have as many blocks as the server says."""
    for each in subscribers:
        each.poll(10)
    reading = waiting.get(f"{url}/cache").json()
    told = [sum(len(each.mirror.hashes(m)) for each in subscribers) for m in ("GPU", "STORAGE")]
    return told == [reading["cached"], reading["disk"]["cached"]] and sum(told) > 0


def test_each_replica_has_a_publisher(short_tmp: Path) -> None:
    flags = ("--data-parallel-size", "2")
    with followed(short_tmp, *flags, replicas=2) as (url, _, subscribers):
        for prompt in PROMPTS[:4]:
            ask(url, prompt=prompt)
        for each in subscribers:
            each.catch_up()
        wait_for(lambda: agrees(url, subscribers), "agreement")
        assert [each.rank for each in subscribers] == [0, 1]
