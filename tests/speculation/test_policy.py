"""Number of drafts to verify, from acceptance and from the cost of steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.plan.speculation import Acceptance, DraftPolicy
from quire.plan.speculation.policy import RESTS
from quire.plan.speculation.step_times import DecodeStep, StepTimes
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

Seconds = Callable[[int], float]


def flat(num_tokens: int) -> float:
    return 0.02


def steep(num_tokens: int) -> float:
    """Seconds of a step with 4-bit weights on two cores."""
    return 0.01 * (1 + 0.25 * (num_tokens - 1))


def knee(num_tokens: int) -> float:
    """Seconds of a step with 8-bit weights on two cores."""
    return 0.015 + 0.00115 * max(0, num_tokens - 8)


def plan(
    times: StepTimes, now: float, num_tokens: int, *, is_drafted: bool = False, counts: bool = True
) -> None:
    """Note the plan of a step that follows the known ones."""
    step = DecodeStep(num_tokens, is_drafted, counts)
    times.planned(now, step, num_before=len(times._in_flight))


class Engine:
    """A clock that steps advance by what they cost; drafts are right with a chance."""

    def __init__(self, seconds: Seconds, num_rows: int, chance: float) -> None:
        self.times = StepTimes()
        self.policy = DraftPolicy(self.times)
        self.rows = [Acceptance() for _ in range(num_rows)]
        self.asked_from = [0] * num_rows
        self.num_steps = 0
        self.now = 0.0
        self.num_tokens = 0
        self.num_drafts = 0
        self._seconds = seconds
        self._chance = chance
        self._rng = np.random.default_rng(0)

    def step(self, offered: int) -> None:
        num_rows = len(self.rows)
        chances = [row.chance for row in self.rows]
        rests = [first > self.num_steps for first in self.asked_from]
        offers = [0 if rest else offered for rest in rests]
        counts = self.policy.counts(num_rows, chances, offers, 64) if any(offers) else None
        awake = [row.chance for row, rest in zip(self.rows, rests, strict=True) if not rest]
        if counts is not None and any(counts):
            assert self.policy.may_take(num_rows, awake, 64), "what is not asked for is not missed"
        is_known, counts = counts is not None, counts or [0] * num_rows
        if is_known:
            self.policy.took(counts)
        total = num_rows + sum(counts)
        self.num_steps += 1
        if total == num_rows:
            self.policy.passed()
        plan(self.times, self.now, total, is_drafted=total > num_rows)
        self.now += self._seconds(total) * (1.08 if total > num_rows else 1.0)
        self.times.applied()
        before = self.num_tokens
        for i, (row, count, offer) in enumerate(zip(self.rows, counts, offers, strict=True)):
            right = 0
            while right < count and self._rng.random() < self._chance:
                right += 1
            if count:
                row.verified(count, right)
            elif offer and is_known:
                row.skipped()
                self.asked_from[i] = (self.num_steps // RESTS + 1) * RESTS
            self.num_tokens += 1 + right
            self.num_drafts += count
        if total > num_rows:
            num_right = self.num_tokens - before - num_rows
            self.policy.verified(num_rows, total - num_rows, num_right)

    def run(self, num_steps: int, offered: int = 4) -> float:
        """Tokens per second, in those of the same engine without drafts."""
        for _ in range(num_steps):
            self.step(offered)
        plain = len(self.rows) / self._seconds(len(self.rows))
        return self.num_tokens / self.now / plain


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("seconds", [flat, steep, knee])
def test_wrong_drafts_cost_next_to_nothing(seconds: Seconds, num_rows: int) -> None:
    assert Engine(seconds, num_rows, chance=0.0).run(300) >= 0.98


@pytest.mark.parametrize("num_rows", [8, 16])
def test_a_machine_with_more_room_than_was_assumed_is_found_out(num_rows: int) -> None:
    """Turns red when nobody tries what was taken for slow, as on a GPU."""
    engine = Engine(flat, num_rows, chance=0.9)
    engine.run(400)
    before, now = engine.num_tokens, engine.now
    engine.run(100)
    assert (engine.num_tokens - before) / (engine.now - now) > 1.5 * num_rows / flat(num_rows)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_right_drafts_pay_where_steps_have_room(num_rows: int) -> None:
    gain = Engine(knee, num_rows, chance=1.0).run(200)
    assert gain > {1: 4.0, 4: 2.2, 16: 0.99}[num_rows]


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("seconds", [flat, steep, knee])
def test_no_chance_is_slower_than_none(seconds: Seconds, num_rows: int, chance: float) -> None:
    assert Engine(seconds, num_rows, chance).run(300) >= 0.98


def test_more_is_verified_of_those_that_are_right_more_often() -> None:
    engine = Engine(knee, 4, 0.5)
    engine.run(3, offered=0)
    counts = engine.policy.counts(4, [0.9, 0.1, 0.6, 0.0], [6] * 4, 64)
    assert counts is not None
    assert counts[0] > counts[2] > counts[3] == 0
    assert engine.policy.counts(4, [0.9] * 4, [6] * 4, 3) in ([1, 1, 1, 0], [3, 0, 0, 0])


def test_drafts_that_became_right_are_found_again() -> None:
    engine = Engine(knee, 1, 0.0)
    engine.run(100)
    engine._chance, before = 1.0, engine.num_tokens
    engine.run(150)
    assert engine.num_tokens - before > 400


def test_one_slow_step_keeps_no_draft_away_for_long() -> None:
    """Turns red when a step that was captured, or that waited, stands for its size for ever."""
    slow = iter([1.0])
    engine = Engine(lambda n: next(slow, 0.02) if n > 1 else 0.02, 1, 1.0)
    engine.run(60)
    before = engine.num_tokens
    engine.run(50)
    assert engine.num_tokens - before > 150


def test_the_time_of_a_step_is_that_between_two_plans() -> None:
    times = StepTimes()
    for now in (10.0, 10.0, 12.0, 14.0):  # two in flight
        plan(times, now, 4)
        if now > 10.0 or times._in_flight:
            times.applied() if len(times._in_flight) == 2 else None
    assert times.expected(4, False) == pytest.approx(2.0)
    times.idle()
    plan(times, 100.0, 4)
    assert times.expected(4, False) == pytest.approx(2.0)


def test_steps_that_compute_prompts_have_no_say() -> None:
    times = StepTimes()
    for i in range(4):
        plan(times, float(i), 8, counts=False)
        times.applied()
    assert not times._times


def test_steps_planned_before_times_were_kept_are_not_taken_for_later_ones() -> None:
    """Turns red when the result of a step that nobody timed is that of the first timed one."""
    times = StepTimes()
    times.planned(0.0, DecodeStep(1, False, True), num_before=2)
    for now in (100.0, 200.0):  # of the two before
        times.applied()
        plan(times, now, 1)
    assert not times.knows(1)
    times.applied()
    plan(times, 201.0, 1)
    assert times.expected(1, False) == pytest.approx(1.0)


def test_asking_the_policy_changes_nothing() -> None:
    """Turns red when who asks whether to wait for results takes the turn of who plans the step."""
    engine = Engine(lambda num_tokens: 0.01 * num_tokens, 8, 0.9)
    engine.run(300)
    engine.policy.took([1])
    asked = ([0.55] * 8, [4] * 8, 64)
    assert [engine.policy.counts(8, *asked) for _ in range(40)] == [[0] * 8] * 40
    explored = 0
    for _ in range(40):
        counts = engine.policy.counts(8, *asked)
        assert counts is not None
        assert engine.policy.counts(8, *asked) == counts
        engine.policy.took(counts)
        if not any(counts):
            engine.policy.passed()
        explored += any(counts)
    assert explored == 2


def test_whoever_makes_wrong_drafts_is_switched_off() -> None:
    """Each request is a new one whose drafts seem good. Their losses count together."""
    engine = Engine(steep, 1, 0.0)
    for _ in range(100):
        engine.rows, engine.asked_from = [Acceptance()], [0]
        engine.run(16)
    assert engine.num_tokens / engine.now * steep(1) >= 0.98


def test_a_wait_for_drafts_is_a_part_of_what_they_cost() -> None:
    """Turns red when steps without drafts seem slower than they are because others wait for them,
    so that drafts seem to cost nothing."""
    times = StepTimes()
    plain, drafted = DecodeStep(4, False, True), DecodeStep(8, True, True)
    times.planned(0.0, plain, num_before=0)
    times.planned(0.0, plain, num_before=1)
    for now in (1.0, 2.0, 3.0):  # two in flight, one of which ends each second
        times.applied()
        times.planned(now, plain, num_before=1)
    assert times.expected(4, False) == pytest.approx(1.0)
    times.applied()  # at 4
    times.applied()  # at 5, after which the host works while nothing computes
    times.planned(5.5, drafted, num_before=0, has_waited=True)
    times.applied()
    times.planned(7.0, plain, num_before=0, has_waited=True)
    assert times.expected(4, False) == pytest.approx(1.0)
    assert times._times[8, True].seconds == pytest.approx(2.0)


def test_a_plan_that_comes_late_changes_no_time() -> None:
    """Turns red when a step seems to take no time because the plan before it was late."""
    times, plain = StepTimes(), DecodeStep(4, False, True)
    times.planned(0.0, plain, num_before=0)
    times.planned(0.0, plain, num_before=1)
    for now in (1.9, 2.0, 3.9, 4.0):
        times.applied(1.0)
        times.planned(now, plain, num_before=1)
    assert times.expected(4, False) == pytest.approx(1.0)


def test_wrong_drafts_are_not_taken_for_a_slow_machine() -> None:
    """Turns red when drafts that are always wrong go on because steps without were measured while
    something else ran: none follows that could put it right."""
    engine = Engine(flat, 1, 0.0)
    engine.run(4, offered=0)
    for each in engine.times._times.values():
        each.seconds *= 3.0
    engine.run(60)
    assert engine.num_drafts < 60
    drafted = engine.num_drafts
    engine.run(8)
    assert engine.num_drafts == drafted
