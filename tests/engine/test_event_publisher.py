"""The publisher of KV events, over sockets: order, gaps, replays, and a queue that is full."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire import LLM
from quire.base.errors import ConfigError
from quire.base.telemetry.kv_events import KVEventsSettings, parse_kv_events
from quire.config.settings import EngineSettings
from quire.engine.core import event_publisher
from quire.engine.core.event_publisher import EventPublisher
from quire.plan.kv_cache import KVManager
from tests.engine.test_rank_faults import children_of
from tests.kv_cache.test_events import log_of, manager, of_pool, told
from tests.kv_subscriber import Subscriber
from tests.waiting import WAIT_S, wait_for

FIRST_TOKENS = count(100, 9)

Maker = Callable[..., tuple[EventPublisher, Subscriber]]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Addresses of sockets are paths of at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def make(short_tmp: Path) -> Iterator[Maker]:
    """A publisher with these settings, and a subscriber of it."""
    opened: list[tuple[EventPublisher, Subscriber]] = []

    def make(*, hwm_here: int = 0, **settings: Any) -> tuple[EventPublisher, Subscriber]:
        events, replay = f"ipc://{short_tmp}/events", f"ipc://{short_tmp}/replay"
        publisher = EventPublisher(KVEventsSettings(events, replay, **settings))
        subscriber = Subscriber(events, replay, settings.get("topic", ""), hwm_here)
        opened.append((publisher, subscriber))
        return opened[-1]

    yield make
    for publisher, subscriber in opened:
        subscriber.__exit__()
        publisher.close()


def prompts(kv: KVManager, publisher: EventPublisher, number: int) -> None:
    """Compute new prompts, each in a batch of its own."""
    for first in islice(FIRST_TOKENS, number):
        told(kv, *range(first, first + 3))
        publisher.tell(log_of(kv))


def agrees(subscriber: Subscriber, kv: KVManager) -> bool:
    subscriber.poll(10)
    return subscriber.mirror.held == of_pool(kv)


def test_who_comes_late_asks_for_the_past(make: Maker) -> None:
    publisher, subscriber = make(topic="kv@here")
    kv = manager()
    publisher.tell(log_of(kv))
    prompts(kv, publisher, 5)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 6, "batches")
    subscriber.catch_up()
    assert subscriber.mirror.held == of_pool(kv) != set()
    assert (subscriber.next_number, subscriber.rank) == (6, 0)
    assert [number for number, _ in subscriber.ask(4)] == [4, 5]
    assert subscriber.ask(6) == []


def test_a_slow_subscriber_fills_its_gaps(make: Maker) -> None:
    """It loses messages, and the engine waits for nobody."""
    publisher, subscriber = make(hwm=1, hwm_here=1, topic="t" * 20_000)
    kv = manager()
    subscriber.catch_up()
    prompts(kv, publisher, 800)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] >= 800, "batches")

    def has_caught_up() -> bool:
        prompts(kv, publisher, 1)  # a last message may have been lost: only another shows it
        return agrees(subscriber, kv)

    wait_for(has_caught_up, "the state of the engine")
    assert subscriber.num_gaps > 0
    assert subscriber.num_starts == 0
    assert publisher.stats()["kv_events_dropped_total"] == 0


def test_a_gap_beyond_the_past_is_followed_by_the_whole_state(make: Maker) -> None:
    publisher, subscriber = make(buffer_steps=2)
    kv = manager()
    publisher.tell(log_of(kv))
    prompts(kv, publisher, 5)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 6, "batches")
    subscriber.catch_up()
    assert subscriber.mirror.held != of_pool(kv), "what it needs is not kept"

    def has_caught_up() -> bool:
        prompts(kv, publisher, 1)
        return agrees(subscriber, kv)

    wait_for(has_caught_up, "the whole state")


def test_requests_for_the_past_repeat_the_whole_state_once(make: Maker) -> None:
    """Fault: each makes the engine send everything again, and the past grows with it."""
    publisher, subscriber = make(buffer_steps=3)
    kv = manager()
    publisher.tell(log_of(kv))
    prompts(kv, publisher, 5)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 6, "batches")
    subscriber.ask(0)
    assert publisher._wants_all.is_set()
    prompts(kv, publisher, 1)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 7, "the whole state")
    assert subscriber.ask(0)
    assert not publisher._wants_all.is_set(), "it is in the answer"
    subscriber.catch_up()
    assert subscriber.mirror.held == of_pool(kv)


def test_the_past_has_a_size(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "MAX_PAST_BYTES", 1000)
    publisher, _ = make()
    kv = manager()
    publisher.tell(log_of(kv))
    prompts(kv, publisher, 20)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 21, "batches")
    publisher.close()
    sizes = [len(payload) for _, payload in publisher._past]
    assert 0 < len(sizes) < 20 and sum(sizes) <= 1000
    assert [number for number, _ in publisher._past] == list(range(21 - len(sizes), 21))


def test_a_full_queue_drops_and_counts_and_then_tells_all(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = make(max_queue_size=1)
    kv = manager()
    publisher.tell(log_of(kv))
    subscriber.catch_up()
    gets_time, send = threading.Event(), publisher._send
    monkeypatch.setattr(publisher, "_send", lambda: (gets_time.wait(WAIT_S), send()))
    prompts(kv, publisher, 3)
    assert publisher.stats()["kv_events_dropped_total"] > 0
    gets_time.set()
    wait_for(lambda: not publisher._waiting, "the thread")

    def has_caught_up() -> bool:
        prompts(kv, publisher, 1)
        return agrees(subscriber, kv)

    wait_for(has_caught_up, "the whole state")


def test_requests_that_are_none_change_nothing(make: Maker, short_tmp: Path) -> None:
    publisher, subscriber = make()
    kv = manager()
    prompts(kv, publisher, 1)
    context = zmq.Context[zmq.Socket[bytes]]()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{short_tmp}/replay")
    for frames in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(300)]):
        dealer.send_multipart(frames)
    wait_for(lambda: publisher.stats()["kv_event_batches_total"] == 1, "batch")
    subscriber.catch_up()
    assert subscriber.mirror.held == of_pool(kv)
    assert not dealer.poll(0)
    context.destroy(linger=0)


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        address = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"endpoint.*cannot be used.*free"):
            EventPublisher(KVEventsSettings(address))
        config = {"enable_kv_cache_events": True, "endpoint": address}
        with pytest.raises(ConfigError, match="cannot be used"):
            LLM(quiet=True, num_kv_blocks=64, max_model_len=64, kv_events_config=config)


@pytest.mark.parametrize("part", ["make_policy", "engine_facts"])
def test_a_start_that_fails_late_leaves_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Fault: ranks, threads and addresses of an engine that nobody had stayed, as when the
    constructor of a policy raised."""
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{short_tmp}/events"}
    settings: dict[str, Any] = {"quiet": True, "num_kv_blocks": 64, "max_model_len": 64}
    before, children = set(threading.enumerate()), set(children_of(os.getpid()))
    ends = list[bool]()

    def fails(*_: object, **__: object) -> None:
        ends.append("quire-kv-events" in {each.name for each in threading.enumerate()})
        raise ConfigError("no")

    monkeypatch.setattr(f"quire.engine.build.{part}", fails)
    with pytest.raises(ConfigError, match=r"^no$"):
        LLM(**settings, kv_events_config=config, tensor_parallel_size=2)
    assert ends == [True], "it did not fail late"
    assert not [each.name for each in set(threading.enumerate()) - before]
    assert not set(children_of(os.getpid())) - children, "ranks"


def test_replicas_have_addresses_of_their_own() -> None:
    settings = KVEventsSettings("tcp://*:5557", "ipc:///run/replay")
    assert settings.of_replica(0) == settings
    third = settings.of_replica(2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "ipc:///run/replay_dp2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"enable_kv_cache_event": True}, "enable_kv_cache_event'. Did you mean enable_kv"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1. Give true or false"),
        ({"publisher": "kafka"}, 'publisher=\'kafka\'. Give "zmq" or "null"'),
        ({"buffer_steps": 0}, "buffer_steps=0. Give an integer of at least 1"),
        ({"hwm": True}, "hwm=True. Give an integer"),
        ({"max_queue_size": "9"}, "max_queue_size='9'. Give an integer"),
        ({"topic": 1}, "topic=1. Give text"),
        ({"topic": "\ud800"}, "topic=.*. Give text that can be printed"),
        ({"endpoint": "inproc://events"}, "endpoint='inproc://events'. Give an address"),
        ({"endpoint": "tcp://*:70000"}, "endpoint='tcp://\\*:70000'. Give an address"),
        ({"endpoint": None}, "endpoint=None. Give an address"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, r"Give tcp://\*:5557, which is bound"),
        ({"replay_endpoint": "tcp://*"}, "replay_endpoint='tcp://\\*'. Give an address"),
        ({"replay_endpoint": "tcp://*:5557"}, "Give another address than endpoint"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings.from_options({"kv_events_config": config})


def test_events_are_off_unless_they_are_asked_for() -> None:
    assert parse_kv_events(None) is None
    assert parse_kv_events("{}") is None
    assert parse_kv_events('{"endpoint": "tcp://*:1"}') is None
    off = {"enable_kv_cache_events": True, "publisher": "null"}
    assert parse_kv_events(json.dumps(off)) is None
    on = parse_kv_events('{"enable_kv_cache_events": true}')
    assert on == KVEventsSettings()
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        EngineSettings.from_options(
            {"kv_events_config": '{"enable_kv_cache_events": true}', "enable_prefix_caching": False}
        )
