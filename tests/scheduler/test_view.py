"""The view of one moment: owners of blocks, steps, reasons to wait, and the tree of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.telemetry.flight.record import FlightRecorder, PlannedPart
from quire.plan.scheduler.readings.view import MAX_STEPS, PIN, shared_prefixes, viewed_steps
from quire.protocol.control import MapBlocks
from quire.protocol.status import EngineView, ViewedGroup, ViewedPrefix, ViewedStep, merge_views
from tests.engine.fake_engine import FakeEngine


def look(engine: FakeEngine) -> tuple[bytes, EngineView]:
    report = engine.core.control(MapBlocks(), engine.now)
    assert report.view is not None
    return report.blocks, report.view


def owners_of(view: EngineView) -> list[int]:
    return [number for number, length in view.owners for _ in range(length)]


def test_owners_agree_with_the_states_of_blocks() -> None:
    """Fault: a block has an owner though it is free, or none though it is used."""
    engine = FakeEngine()
    shared = list(range(1, 17))
    first = engine.add([*shared, 20, 21], max_tokens=20)
    engine.step()
    second = engine.add([*shared, 30], max_tokens=20)
    for _ in range(4):
        engine.step()
    states, view = look(engine)
    owners = owners_of(view)
    assert len(owners) == len(states)
    assert [owner > 0 for owner in owners] == [chr(state) in "us" for state in states]
    names = {group.number: group for group in view.groups}
    assert len(names) == 2 and not any(group.waits for group in view.groups)
    held = {number: owners.count(number) for number in names}
    assert sum(held.values()) == sum(chr(state) in "us" for state in states)
    (prefix,) = view.prefixes
    assert prefix.num_tokens == 16 and prefix.num_sequences == 2 and prefix.parent == -1
    assert set(prefix.groups) == set(names)
    engine.core.abort([*first, *second])
    engine.run()
    assert not look(engine)[1].groups


def test_a_reason_for_each_that_waits() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add([1, 2, 3], max_tokens=30)
    engine.step()
    engine.add([4, 5, 6], max_tokens=4)
    engine.step()
    running, waiting = look(engine)[1].groups
    assert not running.waits and "max_num_seqs" in waiting.waits
    assert waiting.num_blocks == 0 and waiting.num_tokens == 3


def test_a_request_that_has_just_come_waits_for_the_next_step() -> None:
    """Fault: it gets the reason of a step that had nobody to admit."""
    engine = FakeEngine()
    engine.add([1, 2, 3], max_tokens=30)
    engine.step()
    engine.add([4, 5, 6], max_tokens=4)
    assert look(engine)[1].groups[-1].waits == "the next step may admit it"


def test_too_few_blocks_are_a_reason() -> None:
    engine = FakeEngine(num_blocks=8, max_model_len=32)
    engine.add(list(range(1, 20)), max_tokens=8)
    engine.step()
    engine.add(list(range(50, 70)), max_tokens=8)
    engine.step()
    assert "K/V blocks" in look(engine)[1].groups[-1].waits


def test_evicted_blocks_are_named() -> None:
    engine = FakeEngine(num_blocks=8, max_model_len=32)
    for start in (1, 100, 200):
        look(engine)
        engine.add(list(range(start, start + 18)), max_tokens=2)
        engine.run()
    states, view = look(engine)
    assert view.evicted and all(0 <= block < len(states) for block in view.evicted)
    assert len(set(view.evicted)) == len(view.evicted)


def test_steps_are_noted_whether_or_not_somebody_looks() -> None:
    engine = FakeEngine()
    engine.add(list(range(10)), max_tokens=6)
    engine.run()
    _, view = look(engine)
    (steps,) = view.steps
    assert [step.number for step in steps] == list(range(1, 7))
    assert (steps[0].prefill, steps[0].decode) == (10, 0)
    assert {(step.prefill, step.decode, step.rows) for step in steps[1:]} == {(0, 1, 1)}


def test_a_view_has_the_last_steps_with_results() -> None:
    flight = FlightRecorder()
    part = PlannedPart(
        number=0, begin=0, rows=4, prompt_rows=1, decode=2, prefill=3, drafts=5, running=4,
        waiting=0, blocked=0, free=9, cached=0, used=0, evicted=1, tickets=0, in_flight=0,
        preempted=0, reason=b"", handles=b"",
    )  # fmt: skip
    for number in range(MAX_STEPS + 10):
        flight.planned(part._replace(number=number, begin=10**9))
        flight.ended(0.001, 4, 2 * number)
    steps = viewed_steps(flight, 1.5, 9.0)
    assert len(steps) == MAX_STEPS and steps[-1].number == MAX_STEPS + 9
    assert steps[-1] == ViewedStep(MAX_STEPS + 9, 2, 3, 2, 3, 4, 1, 1.0, 0.5)
    assert not viewed_steps(flight, 1.5, 0.4), "too old"
    flight.planned(part._replace(number=1000, begin=10**9))
    assert viewed_steps(flight, 1.5, 9.0)[-1].number == MAX_STEPS + 9, "that one is in flight"
    flight.lost()
    assert viewed_steps(flight, 1.5, 9.0)[-1].number == MAX_STEPS + 9, "it has no result"


BLOCKS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 4) | st.just(PIN)),
    max_size=8,
)


@given(BLOCKS)
def test_a_prefix_is_what_its_owners_share(given_tables: list[tuple[list[int], int]]) -> None:
    """Compares the tree with counts over all prefixes."""
    found = shared_prefixes(given_tables, 1)
    starts: dict[tuple[int, ...], list[int]] = {}
    for blocks, owner in given_tables:
        for end in range(1, len(blocks) + 1):
            starts.setdefault(tuple(blocks[:end]), []).append(owner)
    wanted = {
        (len(start), sum(o != PIN for o in owners), owners.count(PIN))
        for start, owners in starts.items()
        if (len(owners) > 1 or PIN in owners)
        and not any(
            other[:-1] == start and len(them) == len(owners) for other, them in starts.items()
        )
    }
    assert {(p.num_tokens, p.num_sequences, p.num_pins) for p in found} == wanted
    for at, prefix in enumerate(found):
        assert prefix.parent < at
        if prefix.parent >= 0:
            assert found[prefix.parent].num_tokens < prefix.num_tokens


def test_views_of_two_cores() -> None:
    """Fault: groups of two replicas have one number, or a block's owner is on another replica."""
    one = EngineView(
        owners=((0, 2), (1, 2)),
        evicted=(3,),
        steps=((),),
        groups=(ViewedGroup(1, "a", "", 2, 9),),
        prefixes=(ViewedPrefix(-1, 8, 2, 0, (1,)), ViewedPrefix(0, 12, 2, 0, (1,))),
        num_hidden=1,
    )
    both = merge_views([(one, 4), (one, 4)])
    numbers = [group.number for group in both.groups]
    assert len(set(numbers)) == 2 and 0 not in numbers
    assert both.owners == ((0, 2), (numbers[0], 2), (0, 2), (numbers[1], 2))
    assert both.evicted == (3, 7) and both.num_hidden == 2 and len(both.steps) == 2
    assert [prefix.parent for prefix in both.prefixes] == [-1, 0, -1, 2]
    assert both.prefixes[3].groups == (numbers[1],)
    assert merge_views([(one, 4)]) == one


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_all_layer_groups_count(windows: tuple[int | None, ...]) -> None:
    engine = FakeEngine(windows=windows)
    engine.add(list(range(1, 30)), max_tokens=4)
    engine.step()
    states, view = look(engine)
    used = np.frombuffer(states, np.uint8) == ord("u")
    assert view.groups[0].num_blocks == used.sum() == sum(map(bool, owners_of(view)))
