"""Candidates of rows that do not draw: order, bans, temperature, and rows that are broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.sampling import CandidateOutput, SamplingState, find_candidates
from quire.protocol import SamplingParams
from quire.protocol.step import IntArray
from tests.sampling.rows import operation

VOCAB = 40


class History:
    """Two tokens of prompt and one of output, in every row."""

    def prompt_ids(self, slot: int) -> IntArray:
        return np.array([1, 2], np.int32)

    def output_ids(self, slot: int) -> IntArray:
        return np.array([slot], np.int32)


def find(logits: torch.Tensor, count: int, **params: Any) -> CandidateOutput:
    state = SamplingState(len(logits), VOCAB)
    for slot in range(len(logits)):
        state.enter(slot, SamplingParams(**params), 0, 0, (5,), count)
    rows = np.arange(len(logits))
    return find_candidates(logits, rows, rows, state, History(), operation("token_logprobs"))


def logits(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2))


def test_best_first_with_the_models_log_probabilities() -> None:
    raw = logits()
    found = find(raw, 6, temperature=0).candidates
    for slot, row in enumerate(torch.log_softmax(raw, 1)):
        values, ids = row.topk(6)
        assert found[slot].token_ids.tolist() == ids.tolist()
        assert found[slot].scores == pytest.approx(values.numpy(), abs=1e-5)
        assert found[slot].logprobs == ()


def test_equal_scores_stand_in_the_order_of_token_ids() -> None:
    assert find(torch.zeros(1, VOCAB), 4).candidates[0].token_ids.tolist() == [0, 1, 2, 3]


def test_a_temperature_divides_the_logits() -> None:
    raw = logits(1)
    found = find(raw, VOCAB, temperature=0.5).candidates[0]
    expected = torch.log_softmax(raw[0] / 0.5, 0)[found.token_ids.tolist()]
    assert found.scores == pytest.approx(expected.numpy(), abs=1e-5)


def test_bans_and_biases_change_one_tokens_score_and_no_others() -> None:
    """Logits processors of `transformers` do the same after the softmax: 5 is a stop that comes too
    early, 7 is biased."""
    raw = logits(1)
    plain = find(raw, VOCAB).candidates[0]
    edited = find(raw, VOCAB, min_tokens=2, logit_bias={7: 3.0}).candidates[0]
    before = dict(zip(plain.token_ids.tolist(), plain.scores.tolist(), strict=True))
    after = dict(zip(edited.token_ids.tolist(), edited.scores.tolist(), strict=True))
    assert after.pop(5) == -np.inf
    assert after.pop(7) == pytest.approx(before[7] + 3)
    assert after == {token: before[token] for token in after}


def test_log_probabilities_are_of_the_raw_logits() -> None:
    raw = logits(1)
    found = find(raw, 3, temperature=2.0, logprobs=2).candidates[0]
    row = torch.log_softmax(raw[0], 0)
    for rank, (token, entry) in enumerate(zip(found.token_ids, found.logprobs, strict=True), 1):
        assert (entry.token_id, entry.rank) == (token, rank)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert entry.top_ids.tolist() == row.topk(2).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_fails_alone(bad: float) -> None:
    raw = logits()
    whole = find(raw, 4).candidates
    raw[1, 3] = bad
    output = find(raw, 4)
    assert [failure.slot for failure in output.failed] == [1]
    assert "position 3 are not finite" in output.failed[0].message
    for slot in (0, 2):
        assert output.candidates[slot].token_ids.tolist() == whole[slot].token_ids.tolist()


def test_a_processor_that_raises_fails_its_row() -> None:
    def broken(token_ids: Any, row: Any) -> Any:
        if token_ids == [1]:
            raise ValueError("no")
        return row

    output = find(logits(), 4, logits_processors=[broken])
    assert [failure.slot for failure in output.failed] == [1]
    assert sorted(output.candidates) == [0, 2]
