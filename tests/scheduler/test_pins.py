"""Prefixes that are kept, and what is swapped when steps are lost."""

from __future__ import annotations

import math

import pytest

from quire.base.errors import RequestError
from quire.protocol import FinishReason
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

PREFIX = [1 + i % 20 for i in range(23)]
ROOMY = Setup(block_size=4, num_blocks=40, max_model_len=36, max_num_batched_tokens=64)


def pinned(
    setup: Setup = ROOMY,
    seconds: float = math.inf,
    *,
    is_shared: bool = False,
    adapter: str = "",
) -> tuple[Simulation, int]:
    """23 tokens: five blocks of four and a partly filled one."""
    simulation = Simulation(setup)
    (handle,) = simulation.add(
        PREFIX, max_tokens=1, pin_seconds=seconds, pin_is_shared=is_shared, adapter=adapter
    )
    run(simulation)
    return simulation, handle


def run(simulation: Simulation) -> None:
    while simulation.scheduler.has_unfinished or simulation.in_flight:
        while simulation.plan():
            pass
        simulation.apply()


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
def test_requests_branch_off_with_the_partly_filled_block(windows) -> None:
    """Catches tails that are computed again, or written in place by one who shares them."""
    simulation, handle = pinned(Setup(**{**vars(ROOMY), "windows": windows}))
    held = simulation.scheduler.stats().num_used_blocks
    for ending in ([3], [4, 5], [6] * 6):
        simulation.add(PREFIX + ending, max_tokens=4)
    simulation.plan()
    table = simulation.scheduler.state.table
    assert table.num_computed[table.live].sum() == 3 * 23 + 9
    grown = simulation.scheduler.stats().num_used_blocks - held
    assert grown == len(windows) * (1 + 2 + 3)  # a copied tail each, up to 24, 25 and 29 tokens
    (pin,) = simulation.scheduler.state.pins.list(simulation.now)
    assert (pin.handle, pin.num_tokens, pin.hits) == (handle, 23, 3)
    simulation.drain()


def test_a_prompt_that_is_the_prefix_computes_one_token() -> None:
    simulation, _ = pinned()
    simulation.add(PREFIX, max_tokens=4, seed=1)
    simulation.plan()
    assert simulation.standing.sum() == 1
    simulation.drain()


@pytest.mark.parametrize("num_blocks", [40, 18])
def test_samples_are_one_hit(num_blocks) -> None:
    """Also where they do not fit together, and each enters as a group of its own. Hits are what an
    operator goes by: the number of requests that a prefix has served."""
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "num_blocks": num_blocks}))
    handles = simulation.add([*PREFIX, 5], max_tokens=4, n=3)
    groups = {id(simulation.scheduler.state.roster.groups[handle]) for handle in handles}
    assert len(groups) == (1 if num_blocks == 40 else 3)
    run(simulation)
    assert [pin.hits for pin in simulation.scheduler.state.pins.list(simulation.now)] == [1]
    simulation.drain()


def test_a_request_that_comes_back_hits_no_more() -> None:
    simulation, _ = pinned()
    (handle,) = simulation.add([*PREFIX, 5], max_tokens=6)
    simulation.plan()
    simulation.scheduler._lifecycle.preempt(simulation.scheduler.state.roster.groups[handle])
    run(simulation)
    assert [pin.hits for pin in simulation.scheduler.state.pins.list(simulation.now)] == [1]
    simulation.drain()


def test_tenants_do_not_share_pins() -> None:
    simulation, _ = pinned()
    simulation.add([*PREFIX, 5], max_tokens=4, salt="other")
    simulation.plan()
    assert simulation.standing.sum() == 24
    simulation.drain()


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_shared_pin_is_for_every_tenant(windows, enable_prefix_caching) -> None:
    options = {"windows": windows, "enable_prefix_caching": enable_prefix_caching}
    simulation, _ = pinned(Setup(**{**vars(ROOMY), **options}), is_shared=True)
    for salt in ("", "one", "other"):
        simulation.add([*PREFIX, 5], max_tokens=4, salt=salt)
    simulation.plan()
    assert simulation.standing.tolist().count(1) == 3
    (pin,) = simulation.scheduler.state.pins.list(simulation.now)
    assert (pin.is_shared, pin.hits) == (True, 3)
    simulation.drain()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("of_pin", ["", "one"])
def test_a_pin_is_for_one_adapter(of_pin: str, enable_prefix_caching: bool) -> None:
    """Fault: a request takes K/V that another adapter has made, and its tokens are wrong; those
    behind them are then found by others of its adapter."""
    setup = Setup(**{**vars(ROOMY), "enable_prefix_caching": enable_prefix_caching})
    simulation, _ = pinned(setup, is_shared=True, adapter=of_pin)
    for adapter in ("", "one", "other"):
        simulation.add([*PREFIX, 5], max_tokens=4, adapter=adapter)
        simulation.plan()
        assert simulation.standing.sum() == (1 if adapter == of_pin else 24)
        run(simulation)
    (pin,) = simulation.scheduler.state.pins.list(simulation.now)
    assert pin.hits == 1
    simulation.drain()


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
def test_a_tenant_finds_its_own_blocks_behind_a_shared_pin(windows) -> None:
    """Their names begin with its salt, and those of the pin's blocks do not. In a conversation the
    second turn would be computed again, if the tenant's own blocks were not found."""
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "windows": windows}), is_shared=True)
    turn = [*PREFIX, 3, 4, 5, 6, 7, 8]  # two tokens into the eighth block
    simulation.add(turn, max_tokens=4, salt="one")
    run(simulation)
    for salt, num_new in (("one", 30 - 28), ("other", 30 - 23)):
        simulation.add([*turn, 9], max_tokens=2, salt=salt)
        simulation.plan()
        assert simulation.standing.sum() == num_new
        run(simulation)
    simulation.drain()


def test_a_pin_ends_by_time_or_by_word() -> None:
    simulation, handle = pinned(seconds=5.0)
    assert simulation.scheduler.state.pins.list(simulation.now)[0].seconds_left == 5.0
    simulation.now += 6
    assert simulation.scheduler.state.pins.list(simulation.now) == ()
    simulation.plan()
    assert simulation.scheduler.stats().num_used_blocks == 0
    simulation, handle = pinned()
    assert simulation.scheduler.state.pins.release(handle)
    assert not simulation.scheduler.state.pins.release(handle)
    assert simulation.scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("is_shared", [True, False])
def test_equal_texts_are_one_pin(is_shared: bool) -> None:
    """Fault: a client that pins at every start fills half of the pool with one text."""
    simulation, first = pinned(Setup(**{**vars(ROOMY), "num_blocks": 14}), 5.0, is_shared=is_shared)
    held = simulation.scheduler.stats().num_used_blocks
    for seconds in (9.0, 1.0):
        simulation.add(PREFIX, max_tokens=1, pin_seconds=seconds, pin_is_shared=is_shared)
        run(simulation)
    (pin,) = simulation.scheduler.state.pins.list(simulation.now)
    assert pin.handle == first
    assert 5.0 < pin.seconds_left <= 9.0
    assert simulation.scheduler.stats().num_used_blocks == held
    assert simulation.scheduler.state.pins.release(first)
    assert simulation.scheduler.stats().num_used_blocks == 0


def test_texts_of_others_are_pins_of_their_own() -> None:
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "num_blocks": 60}))
    simulation.add(PREFIX, max_tokens=1, pin_seconds=5.0, salt="other")
    simulation.add(PREFIX, max_tokens=1, pin_seconds=5.0, pin_is_shared=True)
    simulation.add(PREFIX[:-1], max_tokens=1, pin_seconds=5.0)
    simulation.add(PREFIX, max_tokens=1, pin_seconds=5.0, adapter="one")
    run(simulation)
    assert len(simulation.scheduler.state.pins.list(simulation.now)) == 5


def test_a_pin_yields_to_a_request_that_could_never_run() -> None:
    """Without that the engine would stand still: all blocks together hold the request."""
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "num_blocks": 12, "max_model_len": 48}))
    (handle,) = simulation.add([7] * 40, max_tokens=6)
    run(simulation)
    assert simulation.clients[handle].finish.reason is FinishReason.LENGTH
    assert simulation.scheduler.state.pins.list(simulation.now) == ()
    simulation.drain()


@pytest.mark.parametrize("is_shared", [True, False])
def test_shared_pins_that_the_engine_let_go_are_known_until_they_are_back(is_shared: bool) -> None:
    """The operator's own word is no loss."""
    setup = Setup(**{**vars(ROOMY), "num_blocks": 12, "max_model_len": 48})
    simulation, handle = pinned(setup, is_shared=is_shared)
    pins = simulation.scheduler.state.pins
    (held,) = pins.list(simulation.now)
    simulation.add([7] * 40, max_tokens=6)
    run(simulation)
    assert pins.lost == ((held.key,) if is_shared else ())
    (handle,) = simulation.add(PREFIX, max_tokens=1, pin_seconds=math.inf, pin_is_shared=True)
    run(simulation)
    assert pins.lost == ()
    assert pins.release(handle)
    assert pins.lost == ()
    simulation.drain()


def test_a_running_request_grows_into_what_is_pinned() -> None:
    """It fits beside the pin when it enters, and no more when it has grown."""
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "num_blocks": 12, "max_model_len": 48}))
    (handle,) = simulation.add([7] * 20, max_tokens=20)
    run(simulation)
    assert simulation.clients[handle].finish.reason is FinishReason.LENGTH
    simulation.drain()


@pytest.mark.parametrize("ticket_steps", [0, 2])
def test_a_pin_does_not_yield_while_another_request_is_swapped_in(ticket_steps: int) -> None:
    """Fault: a request that waits for blocks takes the pin, although it gets them when the one
    that is coming in has ended."""
    simulation, _ = pinned(
        Setup(**{**vars(ROOMY), "num_blocks": 14, "num_host_blocks": 20, "max_model_len": 40,
                 "ticket_steps": (ticket_steps,)})
    )  # fmt: skip
    (first,) = simulation.add([7] * 20, max_tokens=6)
    simulation.plan()
    simulation.apply()
    (second,) = simulation.add([9] * 20, max_tokens=4)
    roster = simulation.scheduler.state.roster
    simulation.scheduler._lifecycle.preempt(roster.groups[first])
    simulation.kv.drop_cached()
    simulation.plan()
    assert roster.groups[first].is_coming_in
    assert not roster.groups[second].has_slots
    run(simulation)
    for handle in (first, second):
        assert simulation.clients[handle].finish.reason is FinishReason.LENGTH
    assert len(simulation.scheduler.state.pins.list(simulation.now)) == 1
    simulation.drain()


def test_pins_that_would_crowd_out_the_others_are_refused() -> None:
    simulation, _ = pinned(Setup(**{**vars(ROOMY), "num_blocks": 14}))
    with pytest.raises(RequestError, match="takes 6 KV blocks, but of the 14 there are only 1"):
        simulation.scheduler.state.pins.check(_request(simulation))


def _request(simulation: Simulation):
    (handle,) = simulation.add([9] * 23, max_tokens=1)
    return simulation.scheduler.state.roster.groups[handle].request


def test_what_was_swapped_by_a_lost_step_is_computed_again() -> None:
    """The copy to the host never happened: the host's block belongs to nobody."""
    simulation = Simulation(Setup(depth=1, num_blocks=60, num_host_blocks=60))
    simulation.add([1, 2, 3], max_tokens=6)
    (second,) = simulation.add([4, 5, 6, 7], max_tokens=6)
    simulation.plan()
    simulation.apply()
    group = simulation.scheduler.state.roster.groups[second]
    simulation.scheduler._lifecycle.preempt(group)
    simulation.scheduler._budget._max_tokens = 1  # so that it is not admitted in the same step
    simulation.plan()
    simulation.scheduler._budget._max_tokens = 8
    assert group.sequences[0].swapped is not None
    simulation.lose_steps()
    assert simulation.clients[second].finish is None
    simulation.drain()
