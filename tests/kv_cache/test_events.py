"""Events of blocks, against the books that they tell of."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis.stateful import invariant, run_state_machine_as_test

from quire.base.telemetry.kv_events import KVEvent, block_hash
from quire.plan.kv_cache import NO_EXTRAS, BlockExtras, KVManager
from quire.plan.kv_cache.events import MEDIA, Chain, EventLog
from quire.plan.kv_cache.notices import Notice, NoticeKind
from quire.protocol.media import Media, MediaSpan
from tests.kv_cache.model import make_layout
from tests.kv_cache.test_machine import KVMachine
from tests.kv_cache.test_sources import compute, names
from tests.kv_subscriber import Mirror
from tests.profiles import machine_settings


def apply(mirror: Mirror, events: list[KVEvent]) -> None:
    for event in events:
        mirror.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event)))


def of_pool(kv: KVManager, medium: str = "device") -> set[tuple[str, int, int]]:
    """Blocks that can be found by name, as a mirror has them."""
    pool = kv.pool if medium == "device" else kv.host._pool
    return {
        (MEDIA[medium], group, block_hash(name))
        for group, index in enumerate(pool._index)
        for name in index
    }


class EventMachine(KVMachine):
    """The same operations, followed by a subscriber."""

    @invariant()
    def mirror_is_the_pool(self) -> None:
        if not hasattr(self, "model"):
            return
        kv = self.model.kv
        if kv.events is None:
            kv.events, self.mirror = kv._open_events(), Mirror()
        apply(self.mirror, kv.events.take())
        held = of_pool(kv)
        assert self.mirror.held <= held, "a block is told of that nobody finds"
        if not kv._log:
            assert self.mirror.held == held
        whole = Mirror()
        apply(whole, kv.events.take_all())
        assert whole.held == self.mirror.held


def test_a_mirror_of_the_events_is_the_pool() -> None:
    run_state_machine_as_test(EventMachine, settings=machine_settings(examples=60, steps=30))


def manager(num_host_blocks: int = 0) -> KVManager:
    """A device of eight blocks of one token."""
    keeps = num_host_blocks > 0
    return KVManager(
        make_layout(((None, 1),), 1), 8, 2, 8, num_host_blocks, keeps_evicted=keeps,
        tells_events=True,
    )  # fmt: skip


def log_of(kv: KVManager) -> EventLog:
    assert kv.events is not None
    return kv.events


def told(kv: KVManager, *tokens: int, settles: bool = True) -> None:
    """Compute a sequence whose tokens the log knows."""
    chain = names(*tokens)
    whole = Chain(chain, np.array(tokens, np.int32), None, "", NO_EXTRAS)
    log_of(kv).describe([(whole, 0, len(chain))])
    compute(kv, chain, settles=settles)
    log_of(kv).describe(())


def test_blocks_are_told_of_when_their_steps_have_ended() -> None:
    """A retracted block was never there."""
    kv, mirror = manager(), Mirror()
    mark = kv.mark()
    told(kv, 1, 2, 3, settles=False)
    apply(mirror, log_of(kv).take())
    assert not mirror.held
    kv.retract(mark)
    kv.settle(kv.mark())
    assert log_of(kv).take() == []
    told(kv, 1, 2, 3)
    events = log_of(kv).take()
    assert len(events) == 1, "one prompt, one event"
    apply(mirror, events)
    assert mirror.predict([1, 2, 3, 4]) == 3


def test_keys_of_a_block_are_those_of_vllm() -> None:
    """The adapter, images with their places, and the tenant's salt where a prompt begins."""
    kv, chain = manager(), names(*range(4))
    image, other = (
        Media(digest, MediaSpan(*span, 0)) for digest, span in ((b"\1", (1, 2)), (b"\2", (2, 1)))
    )
    extras = BlockExtras("french and its digest", (image, other))
    whole = Chain(chain, np.arange(4, dtype=np.int32), "french", "tenant", extras)
    log_of(kv).describe([(whole, 0, 4)])
    compute(kv, chain)
    _, stored = log_of(kv).take()
    assert msgspec.to_builtins(stored)["extra_keys"] == [
        ("french", "tenant"),
        ("french", ("01", 0)),
        ("french", ("01", -1), ("02", 0)),
        ("french",),
    ]


def test_what_another_engine_has_written_has_its_parent() -> None:
    """Parts of states are in a group behind those of layers: nobody follows them."""
    first, second = names(1, 2)
    parents = {(0, first): None, (0, second): first, (1, first): None}
    log = EventLog(make_layout(((None, 1),), 1), tuple, 0, parents.get)
    log.start_with("disk", [((0, first), None), ((1, first), None)])
    for block in ((0, second), (1, second)):
        log.note(Notice(NoticeKind.STORED, "disk", block))
    log.note(Notice(NoticeKind.REMOVED, "disk", (1, first)))
    _, stored = log.take()
    found = msgspec.to_builtins(stored)
    assert found["block_hashes"] == [block_hash(first), block_hash(second)]
    assert (found["parent_block_hash"], found["token_ids"]) == (None, [])


def test_evicted_blocks_keep_their_tokens_on_their_way_to_the_host() -> None:
    kv, mirror = manager(num_host_blocks=8), Mirror()
    told(kv, *range(8))
    told(kv, *range(10, 18))
    for ticket in set(kv.drain().store_ticket):
        kv.end_ticket(ticket)
    apply(mirror, log_of(kv).take())
    assert mirror.held == of_pool(kv) | of_pool(kv, "host")
    assert mirror.predict([*range(8), 99]) == 0
    assert mirror.predict([*range(8), 99], media=["GPU", "CPU"]) == 8
    kv.drop_cached()
    (event,) = log_of(kv).take()
    apply(mirror, [event])
    assert msgspec.to_builtins(event) == {"type": "AllBlocksCleared"}


def test_a_cleared_device_leaves_other_media_alone() -> None:
    """vLLM's word for clearing means all media."""
    kv, mirror = manager(num_host_blocks=8), Mirror()
    told(kv, *range(8))
    told(kv, *range(10, 18))
    for ticket in set(kv.drain().store_ticket):
        kv.end_ticket(ticket)
    apply(mirror, log_of(kv).take())
    kv.pool.drop_cached()
    apply(mirror, log_of(kv).take())
    assert mirror.held == of_pool(kv, "host") != set()
    whole = Mirror()
    apply(whole, log_of(kv).take_all())
    assert whole.predict([*range(8), 99], media=["CPU"]) == 8
