"""How many drafts are verified: by acceptance, and by what steps cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.speculation import Acceptance, DraftPolicy
from quire.speculation.step_times import StepTimes

Seconds = Callable[[int], float]


def flat(num_tokens: int) -> float:
    return 0.02


def steep(num_tokens: int) -> float:
    """As 4-bit weights there."""
    return 0.01 * (1 + 0.25 * (num_tokens - 1))


def knee(num_tokens: int) -> float:
    """As 8-bit weights on two cores."""
    return 0.015 + 0.00115 * max(0, num_tokens - 8)


class Engine:
    """A clock that steps advance by what they cost; drafts are right with a chance."""

    def __init__(self, seconds: Seconds, num_rows: int, chance: float) -> None:
        self.times = StepTimes()
        self.policy = DraftPolicy(self.times)
        self.rows = [Acceptance() for _ in range(num_rows)]
        self.now = 0.0
        self.num_tokens = 0
        self.num_drafts = 0
        self._seconds = seconds
        self._chance = chance
        self._rng = np.random.default_rng(0)

    def step(self, offered: int) -> None:
        num_rows = len(self.rows)
        chances = [row.chance for row in self.rows]
        counts = self.policy.counts(num_rows, chances, [offered] * num_rows, 64)
        total = num_rows + sum(counts)
        self.times.planned(self.now, total, is_drafted=total > num_rows, counts=True)
        self.now += self._seconds(total) * (1.08 if total > num_rows else 1.0)
        self.times.applied()
        for row, count in zip(self.rows, counts, strict=True):
            right = 0
            while right < count and self._rng.random() < self._chance:
                right += 1
            if count:
                row.verified(count, right)
            elif offered:
                row.skipped()
            self.num_tokens += 1 + right
            self.num_drafts += count

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
        times.planned(now, 4, is_drafted=False, counts=True)
        if now > 10.0 or times._in_flight:
            times.applied() if len(times._in_flight) == 2 else None
    assert times.expected(4, False) == pytest.approx(2.0)
    times.idle()
    times.planned(100.0, 4, is_drafted=False, counts=True)
    assert times.expected(4, False) == pytest.approx(2.0)


def test_steps_that_compute_prompts_have_no_say() -> None:
    times = StepTimes()
    for i in range(4):
        times.planned(float(i), 8, is_drafted=False, counts=False)
        times.applied()
    assert not times._times
