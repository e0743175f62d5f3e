"""The kinds of log-probabilities: each is what the plain law says, and processed ones hold a mass
of 1 over the tokens that a draw may give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.sampling import reference
from quire.protocol import SamplingParams
from quire.protocol.step import TokenLogprobs
from tests.profiles import examples
from tests.sampling.rows import sample_one
from tests.sampling.test_edits import V
from tests.sampling.test_sampler_law import some_logits

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
PROMPT, OUTPUT = [1, 2, 2, 9], [2, 5, 5, 3]


@st.composite
def some_params(draw: st.DrawFn) -> dict[str, Any]:
    """Edits and filters together. An odd top_p, as in `filter_params`."""
    return {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 1, 3, 10])),
        "top_p": draw(st.sampled_from([1.0, 0.30037, 0.90037])),
        "min_p": draw(st.sampled_from([0.0, 0.037, 0.5])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.7])),
        "logit_bias": draw(st.sampled_from([None, {3: 2.0, 4: -3.0}])),
        "allowed_token_ids": draw(st.sampled_from([None, [1, 3, 5, 7, 11, 13]])),
        "xtc_probability": draw(st.sampled_from([0.0, 1.0])),
        "xtc_threshold": 0.1,
        "logprobs": draw(st.sampled_from([0, 4, -1])),
    }


def found(logits: np.ndarray, params: SamplingParams, mode: str) -> TokenLogprobs:
    output = sample_one(
        logits, params, prompt_ids=PROMPT, output_ids=OUTPUT, seeds=[3], logprobs_mode=mode
    )
    assert not output.failed
    (entry,) = output.logprobs.values()
    assert entry.token_id == output.token_ids[0]
    return entry


def expected(logits: np.ndarray, params: SamplingParams, mode: str) -> np.ndarray:
    """Values of all tokens [V]; -inf for those that the law leaves out."""
    if mode == "raw_logits":
        return logits.astype(np.float64)
    if mode == "raw_logprobs":
        return reference.log_softmax(logits.tolist())
    edited = reference.edited_logits(logits.tolist(), params, PROMPT, OUTPUT)
    if params.is_greedy:
        return edited if mode == "processed_logits" else reference.log_softmax(edited.tolist())
    is_excluded = reference.excludes_top(params, 3, 0, 7)
    law = reference.law(edited, params, is_top_excluded=is_excluded)
    with np.errstate(divide="ignore"):
        if mode == "processed_logprobs":
            return np.log(law)
    return np.where(law > 0, edited / params.temperature, -np.inf)


@pytest.mark.parametrize("mode", MODES)
@examples(60)
@given(some_params(), st.integers(0, 50))
def test_each_kind_is_what_the_law_says(mode: str, given_params: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**given_params)
    logits = some_logits(V, seed, 3.0)
    entry, values = found(logits, params, mode), expected(logits, params, mode)
    possible = np.flatnonzero(values > -np.inf)
    ranked = sorted(possible.tolist(), key=lambda token: (-values[token], token))
    k = params.logprobs if params.logprobs is not None and params.logprobs >= 0 else len(ranked)
    assert entry.top_ids.tolist() == ranked[:k]
    np.testing.assert_allclose(entry.top_logprobs, values[ranked[:k]], rtol=2e-5, atol=2e-5)
    assert entry.logprob == pytest.approx(values[entry.token_id], rel=2e-5, abs=2e-5)
    assert entry.rank == 1 + ranked.index(entry.token_id)
    if mode == "processed_logprobs" and params.logprobs == -1:
        assert np.exp(entry.top_logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_a_mask_leaves_its_tokens(mode: str) -> None:
    mask = np.array([0b1010_0000_0110], np.uint32)
    params = SamplingParams(temperature=0.7, logprobs=-1)
    logits = some_logits(V, 1)
    entry = sample_one(logits, params, mask=mask, logprobs_mode=mode).logprobs[0]
    allowed = [1, 2, 9, 11]
    assert sorted(entry.top_ids.tolist()) == allowed
    values = logits[entry.top_ids].astype(np.float64) / 0.7
    if mode == "processed_logprobs":
        values = reference.log_softmax(values.tolist())
    np.testing.assert_allclose(entry.top_logprobs, values, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@examples(60)
@given(some_params(), st.integers(0, 50))
def test_the_mass_is_what_filters_leave(mode: str, given_params: dict[str, Any], seed: int) -> None:
    """The mass of the plain law before filters, over the tokens that have a place after them."""
    params = SamplingParams(**given_params)
    logits = some_logits(V, seed, 3.0)
    entry = found(logits, params, mode)
    if params.xtc_probability and not params.is_greedy:
        assert entry.log_mass == 0.0, "its filters are among the edits"
        return
    edited = reference.edited_logits(logits.tolist(), params, PROMPT, OUTPUT)
    left = expected(logits, params, mode) > -np.inf
    scaled = edited if params.is_greedy else edited / params.temperature
    mass = np.exp(reference.log_softmax(scaled.tolist()))[left].sum()
    assert entry.log_mass is not None and entry.log_mass <= 0
    assert np.exp(entry.log_mass) == pytest.approx(mass, rel=2e-5)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.60037}, {"min_p": 0.1}, {}])
def test_raw_is_processed_and_the_mass(filters: dict[str, Any]) -> None:
    for seed in range(20):
        logits = some_logits(V, seed, 3.0)
        params = SamplingParams(logprobs=0, **filters)
        raw, processed = found(logits, params, MODES[0]), found(logits, params, MODES[1])
        assert raw.log_mass is None and processed.log_mass is not None
        assert raw.token_id == processed.token_id
        assert np.exp(raw.logprob - processed.logprob) == pytest.approx(
            np.exp(processed.log_mass), rel=1e-5
        )
        assert (processed.log_mass < -1e-6) == bool(filters)
