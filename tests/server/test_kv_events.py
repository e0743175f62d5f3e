"""A router's view of a server: the prompts that it has, through evictions, resets and new cores."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests import waiting
from tests.kv_subscriber import Subscriber
from tests.server.test_kv_disk import ask, metric, serving, wait_until_saved
from tests.server.test_run import children
from tests.waiting import wait_for

PROMPTS = np.random.default_rng(9).integers(5, 900, (8, 500)).tolist()
HIT = 496


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
        each.sync()
    reading = waiting.get(f"{url}/cache").json()
    told = [sum(len(each.mirror.hashes(m)) for each in subscribers) for m in ("GPU", "STORAGE")]
    stored = (reading["disk"] or {}).get("cached")  # none before the engine's first figures
    return told == [reading["cached"], stored] and sum(told) > 0


def test_a_router_predicts_hits(short_tmp: Path) -> None:
    with followed(short_tmp) as (url, pid, (subscriber,)):
        subscriber.catch_up()
        found: list[int] = []
        for prompt in [*PROMPTS, PROMPTS[-1]]:
            subscriber.sync()
            found.append(subscriber.mirror.predict(prompt))
            assert ask(url, prompt=prompt)[0] == found[-1]
        assert found == [*(0 for _ in PROMPTS), HIT]
        assert subscriber.mirror.predict(PROMPTS[0]) == 0, "it was evicted"
        wait_for(lambda: agrees(url, [subscriber]), "agreement")
        assert metric(url, "kv_events_dropped") == 0
        assert metric(url, "kv_event_batches") > 0

        assert waiting.post(f"{url}/reset_prefix_cache").status_code == 200
        subscriber.sync()
        assert not subscriber.mirror.held
        assert ask(url, prompt=PROMPTS[0])[0] == 0
        wait_until_saved(url, HIT // 16)
        wait_for(lambda: agrees(url, [subscriber]), "agreement")

        (core,) = children(pid)
        os.kill(int(core), signal.SIGKILL)
        wait_for(lambda: subscriber.poll() or subscriber.num_starts, "another core")
        assert not subscriber.mirror.hashes("GPU"), "memory of a core that is gone"
        assert len(subscriber.mirror.hashes("STORAGE")) >= HIT // 16
        wait_for(lambda: waiting.get(f"{url}/readyz").status_code == 200, "readiness")
        wait_for(lambda: agrees(url, [subscriber]), "agreement")
        ask(url, prompt=PROMPTS[0])
        subscriber.sync()
        assert subscriber.mirror.predict(PROMPTS[0]) == ask(url, prompt=PROMPTS[0])[0] == HIT
        wait_for(lambda: agrees(url, [subscriber]), "agreement")


def test_each_replica_has_a_publisher(short_tmp: Path) -> None:
    flags = ("--data-parallel-size", "2")
    with followed(short_tmp, *flags, replicas=2) as (url, _, subscribers):
        for prompt in PROMPTS[:4]:
            ask(url, prompt=prompt)
        for each in subscribers:
            each.catch_up()
        wait_for(lambda: agrees(url, subscribers), "agreement")
        assert [each.rank for each in subscribers] == [0, 1]
