"""Tokens that are drawn beside drafts follow the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.compute.runner.drafts import draw_in_turns
from quire.compute.runner.rows import RowTable
from quire.compute.sampling import Sampler, SamplingState
from quire.protocol import EnterRow, SamplingParams, StepPlan
from quire.protocol.step import IntArray, RowTokens
from tests.profiles import SCALE
from tests.sampling.rows import sampler
from tests.sampling.test_sampler_law import ALPHA, chi_square

V, ROWS, NUM_DRAFTS = 9, 200, 3
NUM_DRAWS = 20_000 * SCALE

Proposer = Callable[[npt.NDArray[np.int64], np.random.Generator], IntArray]
"""Last tokens [R] → drafts [R, NUM_DRAFTS]."""


def model() -> npt.NDArray[np.float32]:
    """Logits [V, V] of what follows each token."""
    return np.random.default_rng(5).normal(0, 1.2, (V, V)).astype(np.float32)


LOGITS = model()
LAW = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum(1, keepdims=True)


def at_random(last: npt.NDArray[np.int64], rng: np.random.Generator) -> IntArray:
    return rng.integers(0, V, (len(last), NUM_DRAFTS)).astype(np.int32)


def most_likely(last: npt.NDArray[np.int64], rng: np.random.Generator) -> IntArray:
    drafts = [LOGITS[last].argmax(1)]
    while len(drafts) < NUM_DRAFTS:
        drafts.append(LOGITS[drafts[-1]].argmax(1))
    return np.stack(drafts, 1).astype(np.int32)


def least_likely(last: npt.NDArray[np.int64], rng: np.random.Generator) -> IntArray:
    return np.repeat(LOGITS[last].argmin(1)[:, None], NUM_DRAFTS, 1).astype(np.int32)


def by_the_law(last: npt.NDArray[np.int64], rng: np.random.Generator) -> IntArray:
    """Drawn as the model would, with other noise."""
    drafts = [last]
    for _ in range(NUM_DRAFTS):
        at = rng.random(len(last))[:, None]
        drafts.append((LAW[drafts[-1]].cumsum(1) < at).sum(1).clip(max=V - 1))
    return np.stack(drafts[1:], 1).astype(np.int32)


def enter(num_rows: int, length: int) -> RowTable:
    rows = RowTable(num_rows, length, [1])
    tables = (np.zeros(1, np.int32),)
    entering = tuple(
        EnterRow(slot, np.array([slot % V], np.int32), 1, 0, tables, SamplingParams(), slot, 0)
        for slot in range(num_rows)
    )
    slots = np.arange(num_rows, dtype=np.int32)
    rows.apply(StepPlan(0, enter=entering, delta_slot=slots, delta_tokens=np.ones_like(slots)))
    return rows


@pytest.mark.parametrize("propose", [at_random, most_likely, least_likely, by_the_law])
def test_drafts_leave_the_distribution_as_it_is(propose: Proposer) -> None:
    """Turns red when a draw depends on whether a draft was right. The tokens after each one must
    follow the model's law, and equal what is drawn without drafts."""
    length = NUM_DRAWS // ROWS + 1
    rows, rng = enter(ROWS, length + NUM_DRAFTS + 2), np.random.default_rng(1)
    state = SamplingState(ROWS, V)
    for slot in range(ROWS):
        state.enter(slot, SamplingParams(), slot, 0, ())
    draws, slots, num_accepted, step = sampler(state), np.arange(ROWS), 0, 1
    while (active := slots[rows.num_tokens[slots] < length]).size:
        last = rows.token_ids[active, rows.num_tokens[active] - 1].astype(np.int64)
        plan = StepPlan(
            step,
            delta_slot=np.setdiff1d(slots, active).astype(np.int32),
            delta_tokens=np.zeros(ROWS - len(active), np.int32),
            draft_slot=np.repeat(active, NUM_DRAFTS).astype(np.int32),
            draft_token=propose(last, rng).ravel(),
        )
        rows.apply(plan)
        scheduled = rows.scheduled()
        rows.commit_computed(scheduled)
        found = _verify(rows, active, draws)
        num_accepted += int((found.counts - 1).sum())
        step += 1
    tokens = rows.token_ids[:, :length].astype(np.int64)
    assert tokens[:, 1:].size >= NUM_DRAWS
    assert num_accepted > 0
    for before in range(V):
        after = tokens[:, 1:][tokens[:, :-1] == before]
        assert chi_square(after, LAW[before]) > ALPHA / V
    assert np.array_equal(tokens, _without_drafts(state, length))


def _verify(rows: RowTable, active: npt.NDArray[np.int64], draws: Sampler) -> RowTokens:
    """Draw with the logits of a forward over the drafts."""
    starts = rows.num_tokens[active]
    context = np.stack([rows.token_ids[active, starts - 1 + i] for i in range(NUM_DRAFTS + 1)])

    def draw(which: npt.NDArray[np.int64], turn: int) -> IntArray:
        logits = torch.from_numpy(LOGITS[context[turn, which]])
        places = rows.num_tokens[active[which]]
        return draws.sample(logits, active[which], places, rows).token_ids

    return draw_in_turns(rows, active, draw)


def _without_drafts(state: SamplingState, length: int) -> npt.NDArray[np.int64]:
    draws, slots = sampler(state), np.arange(ROWS)
    tokens = (slots % V)[:, None]
    rows = enter(ROWS, length)
    while tokens.shape[1] < length:
        logits = torch.from_numpy(LOGITS[tokens[:, -1]])
        places = np.full(ROWS, tokens.shape[1])
        drawn = draws.sample(logits, slots, places, rows).token_ids
        tokens = np.concatenate((tokens, drawn[:, None].astype(np.int64)), 1)
    return tokens
