"""Log-probabilities equal float64 log-softmax of the raw logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import EngineError
from quire.compute.sampling import prompt_logprobs, reference, token_logprobs
from quire.protocol import SamplingParams
from tests.profiles import examples
from tests.sampling.rows import operation, sample_one, sample_rows

READ = operation("token_logprobs")


@examples(60)
@given(st.integers(1, 300), st.integers(-1, 40), st.integers(0, 10_000), st.booleans(),
       st.sampled_from([0.1, 3.0, 60.0]))  # fmt: skip
def test_values_ranks_and_order(vocab_size, k, seed, ties, scale):
    """Catches lost precision, ranks off by one, and an order that ties make vary."""
    random = np.random.default_rng(seed)
    row = (random.standard_normal(vocab_size) * scale).astype(np.float32)
    row = np.round(row) if ties else row
    token_id = int(random.integers(vocab_size))
    expected = reference.log_softmax(row.tolist())
    order = sorted(range(vocab_size), key=lambda i: (-row[i], i))
    (got,) = token_logprobs(
        READ,
        torch.from_numpy(row[None]),
        np.zeros(1, np.int64),
        np.array([token_id], np.int32),
        np.array([k]),
    )
    assert got.token_id == token_id
    assert got.logprob == pytest.approx(expected[token_id], abs=1e-5, rel=1e-6)  # a float32
    assert got.rank == order.index(token_id) + 1
    top = order if k < 0 else order[:k]
    assert got.top_ids.tolist() == top
    np.testing.assert_allclose(got.top_logprobs, expected[top], atol=1e-5, rtol=1e-6)
    listed = dict(zip(got.top_ids.tolist(), got.top_logprobs.tolist(), strict=True))
    assert listed.get(token_id, got.logprob) == got.logprob
    assert (got.top_ids.dtype, got.top_logprobs.dtype) == (np.int32, np.float32)


def test_sampled_logprobs_are_those_of_the_model():
    """Catches logprobs read after bias, bans, penalties or temperature (vLLM: raw_logprobs)."""
    row = np.array([3.0, 2.0, 1.0, -np.inf], np.float32)
    params = SamplingParams(
        temperature=0.2, logit_bias={0: -50}, allowed_token_ids=[0, 2], logprobs=2,
    )  # fmt: skip
    got = sample_one(row, params).logprobs[0]
    expected = row[:3].astype(np.float64) - np.log(np.exp(row[:3].astype(np.float64)).sum())
    assert (got.token_id, got.rank, got.top_ids.tolist()) == (2, 3, [0, 1])
    assert got.logprob == pytest.approx(expected[2], abs=1e-6)
    np.testing.assert_allclose(got.top_logprobs, expected[:2], atol=1e-6)


def test_prompt_logprobs_read_row_by_row():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    entries = prompt_logprobs(READ, logits, np.array([3, 1, 4, 1, 5], np.int32), 2)
    assert [entry.token_id for entry in entries] == [3, 1, 4, 1, 5]
    expected = torch.log_softmax(logits.double(), -1)
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-5)
        assert entry.top_ids.tolist() == expected[row].topk(2).indices.tolist()


def test_prompt_logprobs_refuse_broken_logits():
    """Catches NaN in a response, which is no JSON."""
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        prompt_logprobs(READ, logits, [1, 2], 0)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_rows_that_ask_for_different_numbers(mode: str) -> None:
    """Catches entries that change places, or bits that depend on who else asks."""
    logits = np.random.default_rng(2).standard_normal((6, 300)).astype(np.float32) * 4
    asked = [0, 5, None, -1, 5, 0]
    params = [SamplingParams(temperature=0.9, logprobs=each) for each in asked]
    together = sample_rows(logits, params, logprobs_mode=mode).logprobs
    assert sorted(together) == [0, 1, 3, 4, 5]
    for slot, entry in together.items():
        alone = sample_rows(logits[[slot]], [params[slot]], seeds=[slot], logprobs_mode=mode)
        expected = alone.logprobs[0]
        assert (entry.token_id, entry.logprob) == (expected.token_id, expected.logprob)
        assert (entry.rank, entry.log_mass) == (expected.rank, expected.log_mass)
        assert entry.top_ids.tolist() == expected.top_ids.tolist()
        assert entry.top_logprobs.tolist() == expected.top_logprobs.tolist()
        assert len(entry.top_ids) == (300 if asked[slot] == -1 else asked[slot])
