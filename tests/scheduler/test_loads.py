"""Prefixes that the device has lost and a source still holds: loaded before admission, or computed.

The fake model's tokens are hashes of the K/V that it reads, so a block with the wrong content shows
in the tokens, which `drain` compares with those of a model without a cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.plan.scheduler.sequence import GroupState
from quire.protocol import FinishReason
from quire.protocol.recovery import RecoveryCosts
from tests.pairs import LAWS_BY_PAIRS
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
MEDIA = pytest.mark.parametrize("medium", ["host", "source"])
PROMPT = list(range(1, 18))


def evicted(medium: str, **changes: Any) -> Simulation:
    """An engine that has answered `PROMPT`, and no longer has it on the device but elsewhere."""
    setup: dict[str, Any] = {
        "num_blocks": 12,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "keeps_evicted": medium == "host",
        "num_host_blocks": 40 * (medium == "host"),
        "num_places": 40 if medium == "source" else None,
    }
    simulation = Simulation(Setup(**{**setup, **changes}))
    simulation.add(PROMPT, max_tokens=2)
    simulation.drain()
    for token in range(2 + simulation.setup.num_blocks // 9):  # each of 9 blocks or more
        simulation.add([token] * 18, max_tokens=2)
        simulation.drain()
    assert simulation.scheduler.stats().blocks_stored_total >= 8
    return simulation


def come_back(simulation: Simulation, **changes: Any) -> int:
    """Ask `PROMPT` again; return the handle."""
    (handle,) = simulation.add(PROMPT, **{"max_tokens": 3, **changes})
    return handle


def answer(simulation: Simulation, **changes: Any) -> int:
    """Ask `PROMPT` again, and return how many of its tokens came from the cache."""
    before = simulation.scheduler.stats().cached_tokens_total
    come_back(simulation, **changes)
    simulation.drain()
    return simulation.scheduler.stats().cached_tokens_total - before


@DEPTHS
@MEDIA
def test_an_evicted_prefix_is_loaded(depth: int, medium: str) -> None:
    simulation = evicted(medium, depth=depth)
    assert answer(simulation) == 16
    stats = simulation.scheduler.stats()
    assert stats.blocks_loaded_total == 8
    assert stats.blocks_lost_total == stats.late_loads_total == 0


@DEPTHS
@MEDIA
def test_without_its_source_it_is_computed(depth: int, medium: str) -> None:
    """Else the test above could pass on blocks that the device has kept."""
    simulation = evicted(medium, depth=depth)
    for source in simulation.kv.sources._sources:
        source.clear()
    assert answer(simulation) == 0


@MEDIA
def test_another_tenant_loads_nothing(medium: str) -> None:
    simulation = evicted(medium)
    assert answer(simulation, salt="other") == 0
    assert simulation.scheduler.stats().blocks_loaded_total == 0


@MEDIA
def test_another_adapter_loads_nothing(medium: str) -> None:
    simulation = evicted(medium)
    assert answer(simulation, adapter="one") == 0
    assert simulation.scheduler.stats().blocks_loaded_total == 0


@DEPTHS
@pytest.mark.parametrize("fault", ["losses", "corruptions"])
def test_what_does_not_arrive_is_computed_and_forgotten(depth: int, fault: str) -> None:
    """All of it; nobody fails, and nobody asks for it again."""
    simulation = evicted("source", depth=depth)
    simulation.executor.tiers.lose = lambda blocks: blocks if fault == "losses" else blocks[:0]
    simulation.executor.tiers.by_number[1]._corrupt = lambda places: (
        places if fault == "corruptions" else places[:0]
    )
    assert answer(simulation) == 0
    stats = simulation.scheduler.stats()
    assert stats.blocks_lost_total == 8
    assert stats.blocks_loaded_total == 0
    assert stats.blocks_removed_total == 8


@DEPTHS
def test_a_part_that_arrives_is_used_up_to_the_first_gap(depth: int) -> None:
    simulation = evicted("source", depth=depth)
    handle = come_back(simulation)
    assert simulation.plan()
    group = simulation.scheduler.state.roster.groups[handle]
    (ticket,) = group.blocked_on
    blocks = list(simulation.kv.sources._loads[ticket].values())
    simulation.executor.tiers.lose = lambda given: given[given == blocks[5]]
    while group.state is GroupState.BLOCKED:
        simulation.apply()
    simulation.executor.tiers.lose = lambda given: given[:0]
    before = simulation.scheduler.stats().cached_tokens_total
    simulation.drain()
    assert simulation.scheduler.stats().cached_tokens_total - before == 10
    assert simulation.scheduler.stats().blocks_lost_total == 1


@DEPTHS
@MEDIA
def test_a_late_load_is_not_waited_for(depth: int, medium: str) -> None:
    """The prompt is computed when the deadline passes. The load keeps its blocks until it ends, and
    whoever comes after that finds them."""
    simulation = evicted(medium, depth=depth, load_seconds=0.55, num_blocks=24)
    simulation.executor.tiers.ticket_steps = lambda _: 30
    handle = come_back(simulation)
    group = simulation.scheduler.state.roster.groups[handle]
    simulation.plan()
    assert group.state is GroupState.BLOCKED
    started = simulation.now
    while group.state is GroupState.BLOCKED:
        simulation.apply()
        simulation.plan()
    assert 0.5 < simulation.now - started < 0.8
    while simulation.clients[handle].finish is None:
        simulation.plan()
        simulation.apply()
    assert simulation.kv.transfers.are_under_way
    assert simulation.scheduler.stats().late_loads_total == 1
    simulation.drain()
    assert not simulation.kv.transfers.are_under_way
    assert simulation.scheduler.stats().blocks_loaded_total > 0


@DEPTHS
@MEDIA
def test_a_load_leaves_all_else_running(depth: int, medium: str) -> None:
    simulation = evicted(medium, depth=depth, num_blocks=20)
    simulation.executor.tiers.ticket_steps = lambda _: 8
    handle = come_back(simulation)
    (other,) = simulation.add([3, 4, 5], max_tokens=9)
    group = simulation.scheduler.state.roster.groups[handle]
    simulation.plan()
    assert group.state is GroupState.BLOCKED
    assert not group.has_slots
    table = simulation.scheduler.state.table
    while group.state is GroupState.BLOCKED:
        before = int(table.num_computed[np.flatnonzero(table.live)].sum())
        planned = simulation.num_steps
        while simulation.plan():
            pass
        simulation.apply()
        made = simulation.num_steps - planned
        live = np.flatnonzero(table.live)
        assert not len(live) or int(table.num_computed[live].sum()) >= before + made
    assert len(simulation.clients[other].tokens) >= 6
    simulation.drain()


@DEPTHS
@MEDIA
@pytest.mark.parametrize("steps", [0, 3])
def test_abort_while_a_load_is_under_way(depth: int, medium: str, steps: int) -> None:
    simulation = evicted(medium, depth=depth, ticket_steps=(steps,))
    handle = come_back(simulation)
    simulation.plan()
    simulation.abort(handle)
    simulation.drain()
    assert simulation.clients[handle].finish.reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert answer(simulation) == 16


@DEPTHS
@MEDIA
def test_a_reset_of_the_cache_drops_what_is_on_its_way(depth: int, medium: str) -> None:
    """A load of the time before brings no names back."""
    simulation = evicted(medium, depth=depth, ticket_steps=(3,))
    come_back(simulation)
    simulation.plan()
    before = simulation.scheduler.stats().cached_tokens_total
    simulation.scheduler.reset_prefix_cache(reset_running=False)
    simulation.check()
    simulation.drain()
    assert simulation.scheduler.stats().cached_tokens_total == before


@DEPTHS
@MEDIA
def test_lost_steps_lose_loads_and_stores(depth: int, medium: str) -> None:
    """A group that waits for a load is computed; it is not at fault."""
    simulation = evicted(medium, depth=depth, ticket_steps=(3,))
    handle = come_back(simulation)
    simulation.plan()
    simulation.lose_steps()
    assert simulation.scheduler.state.roster.groups[handle].state is GroupState.WAITING
    simulation.drain()
    assert simulation.clients[handle].finish.reason is FinishReason.LENGTH  # type: ignore[union-attr]
    assert simulation.kv.host.num_used == 0
    assert answer(simulation) == 16


@MEDIA
@pytest.mark.parametrize("seconds_per_block", [1.9, 2.1])
def test_a_load_that_costs_more_than_it_saves_is_not_made(
    medium: str, seconds_per_block: float
) -> None:
    """A block of two tokens, of one second each."""
    costs = RecoveryCosts(1.0, seconds_per_block)
    simulation = evicted(medium, recovery_costs=costs, num_host_blocks=40)
    pays = seconds_per_block < 2
    assert (answer(simulation) == 16) is pays
    assert (simulation.scheduler.stats().blocks_loaded_total > 0) is pays


@DEPTHS
@MEDIA
def test_a_preempted_request_finds_its_own_blocks(depth: int, medium: str) -> None:
    """Computed again only where nobody holds it: the pool has room for one of the two."""
    costs = RecoveryCosts(1.0, 1.5)  # too dear to swap both ways
    simulation = evicted(medium, depth=depth, recovery_costs=costs, num_blocks=16)
    simulation.add([1, 2, 3, 4, 5, 6], max_tokens=20)
    simulation.add([6, 5, 4, 3, 2, 1], max_tokens=20)
    simulation.drain()
    stats = simulation.scheduler.stats()
    assert stats.preempted_total > 0
    assert stats.swapped_out_total == 0
    assert stats.blocks_loaded_total > 0


def test_a_full_source_drops_what_was_used_longest_ago() -> None:
    """Room for one prompt of two: the later one is held."""
    simulation = evicted("host", num_host_blocks=9)
    assert simulation.scheduler.stats().blocks_removed_total > 0
    assert answer(simulation) == 0


@DEPTHS
def test_swapped_sequences_have_the_host_before_evicted_blocks(depth: int) -> None:
    simulation = evicted("host", depth=depth, num_host_blocks=12, num_blocks=16)
    for start in (1, 3, 5):
        simulation.add(range(start, start + 8), max_tokens=20)
    simulation.drain()
    stats = simulation.scheduler.stats()
    assert stats.swapped_out_total > 0
    assert stats.swapped_in_total > 0


@DEPTHS
@MEDIA
@pytest.mark.parametrize("end", ["arrives", "lost", "late", "aborted"])
def test_requests_with_one_prefix_share_a_load(depth: int, medium: str, end: str) -> None:
    """Also when the one that has started it gives up."""
    seconds = 0.55 if end == "late" else 5.0
    simulation = evicted(medium, depth=depth, num_blocks=40, load_seconds=seconds)
    simulation.executor.tiers.ticket_steps = lambda _: 12 if end == "late" else 3
    simulation.executor.tiers.lose = lambda given: given if end == "lost" else given[:0]
    handles = [come_back(simulation, seed=seed) for seed in range(3)]
    simulation.plan()
    groups = [simulation.scheduler.state.roster.groups[handle] for handle in handles]
    assert [group.state for group in groups[:2]] == [GroupState.BLOCKED] * 2
    if end == "aborted":
        simulation.abort(handles[0])
    simulation.drain()
    stats = simulation.scheduler.stats()
    assert stats.blocks_loaded_total + stats.blocks_lost_total == 8
    assert stats.late_loads_total == (3 if end == "late" else 0)


@MEDIA
def test_no_more_loads_are_started_than_there_are_slots(medium: str) -> None:
    """Else their blocks would be evicted before their requests are admitted."""
    simulation = evicted(medium, num_blocks=27, max_num_seqs=2)
    simulation.executor.tiers.ticket_steps = lambda _: 4
    for prompt in (PROMPT, [0] * 18, [1] * 18):
        simulation.add(prompt, max_tokens=2)
    simulation.plan()
    blocked = simulation.scheduler.state.roster.blocked
    assert len(blocked) == simulation.setup.max_num_seqs
    simulation.drain()
