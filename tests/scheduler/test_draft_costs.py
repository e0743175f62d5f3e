"""Time that drafts save and cost, by a clock that steps advance: the scheduler with its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.plan.scheduler.drafts import Drafts
from quire.plan.scheduler.drafts.forced import ForcedTokens
from quire.plan.scheduler.drafts.guesses import Guesses
from quire.plan.scheduler.drafts.room import DraftRoom
from quire.plan.speculation.policy import RESTS, DraftPolicy
from quire.protocol import SamplingParams, StepPlan
from quire.protocol.request import EngineRequest
from tests.scheduler.expected import VOCAB, expected_tokens
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
LENGTH = 512
Seconds = Callable[[int], float]


def knee(num_tokens: int) -> float:
    """Costs of 8-bit weights on two cores."""
    return 0.015 + 0.00115 * max(0, num_tokens - 8)


def steep(num_tokens: int) -> float:
    """Costs of 4-bit weights there."""
    return 0.01 * (1 + 0.25 * (num_tokens - 1))


@pytest.fixture(autouse=True)
def _predictions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed without a prediction."""
    monkeypatch.setattr("tests.scheduler.simulation.METHODS", None)


class Clock:
    """Decodes one answer by the core's rules; a step begins when the one before it ends."""

    def __init__(self, depth: int, seconds: Seconds, **more: Any) -> None:
        given = {"max_num_batched_tokens": 64, "num_blocks": 300, **more}
        setup = Setup(depth=depth, guesses="methods", max_model_len=LENGTH + 16, **given)
        self.simulation = Simulation(setup)
        self.now = 0.0
        self.num_drafted = 0
        self.num_full = 0  # steps planned while as many were in flight as may be
        self._seconds = seconds
        self._standing = np.zeros(setup.max_num_seqs, np.int64)

    def add(self, share: float | None, handle: int = 0) -> None:
        """Add a request that predicts its answer with a share of wrong tokens; None: it predicts
        nothing."""
        prompt, rng = (4, 9, 2, 7, 5), np.random.default_rng(handle)
        setup = self.simulation.setup
        truth = np.array(expected_tokens(setup.model, prompt, LENGTH, handle, 0), np.int32)
        is_wrong = rng.random(LENGTH) < (share or 0.0)
        said = np.where(is_wrong, (truth + 1 + rng.integers(0, VOCAB - 1, LENGTH)) % VOCAB, truth)
        request = EngineRequest(
            str(handle),
            handle,
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=LENGTH),
            seed=handle,
            prediction_token_ids=truth[:0] if share is None else said.astype(np.int32),
        )
        self.simulation.scheduler.add(request)

    def run(self) -> float:
        """Seconds until all has ended."""
        scheduler, started = self.simulation.scheduler, self.now
        in_flight: list[tuple[Any, float]] = []
        while scheduler.has_unfinished:
            while len(in_flight) < self.simulation.setup.depth and not scheduler.awaits_results:
                plan = scheduler.plan(self.now)
                if plan is None:
                    break
                in_flight.append((self.simulation.executor.execute(plan), self._cost(plan)))
                self.num_full += len(in_flight) == self.simulation.setup.depth
            if not in_flight:
                scheduler.flush()
                continue
            future, seconds = in_flight.pop(0)
            self.now += seconds
            scheduler.apply(future.result())
        return self.now - started

    def _cost(self, plan: StepPlan) -> float:
        self._standing[plan.leave] = 0
        self._standing[plan.delta_slot] = plan.delta_tokens
        num_drafts = len(plan.draft_slot)
        self.num_drafted += num_drafts > 0
        return self._seconds(int(self._standing.sum()) + num_drafts) * (1.08 if num_drafts else 1)


def gain(depth: int, seconds: Seconds, share: float) -> float:
    """Tokens per second of one stream, in those without drafts."""
    found: list[float] = []
    for said in (None, share):
        clock = Clock(depth, seconds)
        clock.add(said)
        found.append(clock.run())
    return found[0] / found[1]


@DEPTHS
@pytest.mark.parametrize("seconds", [knee, steep])
def test_wrong_predictions_cost_next_to_nothing(depth: int, seconds: Seconds) -> None:
    """A proposer that always offers and is always wrong is switched off."""
    assert gain(depth, seconds, 1.0) >= 0.98


@DEPTHS
def test_right_predictions_gain(depth: int) -> None:
    assert gain(depth, knee, 0.0) >= 4.0
    assert gain(depth, knee, 0.2) >= 1.5


@DEPTHS
def test_requests_without_guesses_pay_nothing_after_one_with_a_prediction(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when one prediction has all later steps look for drafts."""
    clock = Clock(depth, knee)
    clock.add(0.0)
    clock.run()
    assert clock.num_drafted > 0
    for owner, name in (
        (Guesses, "find"),
        (Guesses, "_offers"),
        (Guesses, "_settle"),
        (ForcedTokens, "find"),
        (DraftRoom, "may_draft"),
    ):
        monkeypatch.setattr(owner, name, None)
    monkeypatch.setattr("quire.plan.speculation.step_times.StepTimes.planned", None)
    monkeypatch.setattr("quire.plan.speculation.step_times.StepTimes.applied", None)
    clock.add(None, handle=1)
    clock.run()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_drafts_that_do_not_pay_leave_steps_as_they_are(
    depth: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when sequences whose drafts are not worth a look are looked at in each step: the
    host's work between steps is then ten times as much; or when steps wait for drafts in vain."""
    asked: list[int] = []
    offers = Guesses._offers

    def noted(guesses: Guesses, *args: Any) -> Any:
        asked.append(guesses._num_planned)
        return offers(guesses, *args)

    monkeypatch.setattr(Guesses, "_offers", noted)
    monkeypatch.setattr("tests.scheduler.test_draft_costs.LENGTH", 128)
    found: list[tuple[int, int]] = []
    for share in (None, 1.0):
        more = {"max_num_seqs": num_rows, "num_blocks": 1200, "max_num_batched_tokens": 128}
        clock = Clock(depth, knee, **more)
        scheduler = clock.simulation.scheduler
        guesses = scheduler._drafts._guesses
        assert guesses is not None
        guesses.policy._credit = -100.0  # spent
        for handle in range(num_rows):
            clock.add(share, handle)
        clock.run()
        found.append((scheduler.stats().steps_total, clock.num_full))
    assert found[1] == found[0]
    assert asked
    assert len(set(asked)) < found[0][0] / RESTS + 10


def test_waiting_for_results_takes_no_turn_of_anybody() -> None:
    """Turns red when rests count down, or offers count as skipped, by being asked about."""
    clock = Clock(2, steep)
    clock.add(1.0)
    scheduler = clock.simulation.scheduler
    for _ in range(200):
        plan = scheduler.plan(clock.now)
        if plan is None:
            break
        result = clock.simulation.executor.execute(plan).result()
        sequence = scheduler.state.table.sequences[0]
        assert sequence is not None
        before = vars_of(sequence.acceptance)
        for _ in range(20):
            _ = scheduler.awaits_results
        assert vars_of(sequence.acceptance) == before
        clock.now += 0.01
        scheduler.apply(result)


def test_drafts_of_an_aborted_row_are_drafts_and_of_no_other_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when they pass for tokens that the step computes anyway, or count as verified."""
    clock, seen = Clock(1, knee), list[tuple[int, ...]]()
    scheduler, verified = clock.simulation.scheduler, DraftPolicy.verified

    def noted(policy: DraftPolicy, *counts: int) -> None:
        seen.append(counts)
        verified(policy, *counts)

    monkeypatch.setattr(DraftPolicy, "verified", noted)
    for handle in range(2):
        clock.add(0.0, handle)
    plan = scheduler.plan(clock.now)
    while plan is not None and len(set(plan.draft_slot.tolist())) < 2:
        result = clock.simulation.executor.execute(plan).result()
        clock.now += clock._cost(plan)
        scheduler.apply(result)
        plan = scheduler.plan(clock.now)
    assert plan is not None
    result = clock.simulation.executor.execute(plan).result()
    assert result.counts is not None
    is_left = result.slots == scheduler.state.table.handle.tolist().index(0)
    num_left = int((plan.draft_slot == result.slots[is_left]).sum())
    before = scheduler.stats().draft_tokens_total
    seen.clear()
    scheduler.abort(1)
    scheduler.apply(result)
    assert seen == [(2, len(plan.draft_slot), int(result.counts[is_left][0]) - 1)]
    assert scheduler.stats().draft_tokens_total == before + num_left


def vars_of(record: Any) -> dict[str, Any] | None:
    """The record's fields as they are now."""
    return None if record is None else dict(vars(record))


@DEPTHS
def test_a_sequence_learns_from_its_first_drafts(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when drafts count for nothing before some were refused: then wrong ones are taken
    in each step as long as times say that they cost nothing."""
    clock, chances = Clock(depth, knee), list[float]()
    verified, table = Drafts.verified, clock.simulation.scheduler.state.table

    def noted(drafts: Drafts, slots: Any, *counts: Any) -> None:
        verified(drafts, slots, *counts)
        record = table.at(int(slots[0])).acceptance
        chances.append(1.0 if record is None else record.chance)

    monkeypatch.setattr(Drafts, "verified", noted)
    clock.simulation.scheduler._results._on_verified = clock.simulation.scheduler._drafts.verified
    clock.add(1.0)
    clock.run()
    assert chances[0] < 0.3
