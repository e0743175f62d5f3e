"""Tokens follow the exact law, equal the slow reference, and do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quire.compute.sampling import SamplingState, reference
from quire.protocol import SamplingParams
from tests.profiles import examples
from tests.sampling.rows import Tokens, draw_many, sample_rows, sampler

ALPHA = 1e-5
"""Per configuration; about 30 of them. Seeds are fixed, so the outcome does not vary."""

CONFIGURATIONS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    for temperature in (0.3, 1.0, 1.7)
    for top_k, top_p, min_p in (
        (0, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 1.0, 0.1),
        (12, 0.9, 0.0),
        (12, 0.95, 0.05),
        (0, 0.999, 0.01),
    )
]


def short(params: SamplingParams) -> str:
    return f"T{params.temperature} k{params.top_k} p{params.top_p} min{params.min_p}"


def some_logits(vocab_size: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * scale).astype(np.float32)


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    """p-value; rare tokens are put together so that each cell expects at least 10."""
    expected = law * tokens.size
    counts = np.bincount(tokens, minlength=law.size)
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    used = wanted > 0
    return float(stats.chisquare(observed[used], wanted[used]).pvalue)


@pytest.mark.parametrize("params", CONFIGURATIONS, ids=short)
def test_draws_follow_the_exact_law(params):
    """Catches a wrong filter, a wrong order of filters, and noise that is not Gumbel."""
    logits = some_logits(40)
    law = reference.law(logits.astype(np.float64), params)
    tokens = draw_many(logits, params, 5_000)
    assert (law[tokens] > 0).all(), "a token outside the filtered set was drawn"
    assert np.count_nonzero(law) == 1 or chi_square(tokens, law) > ALPHA


def test_large_vocabulary_follows_the_exact_law():
    """Catches errors that need several blocks of noise, and winners dropped by the bound."""
    logits = some_logits(70_001, scale=0.5)
    law = reference.law(logits.astype(np.float64), SamplingParams())
    bins = np.arange(law.size) % 50
    tokens = draw_many(logits, SamplingParams(seed=3), 2_000)
    assert chi_square(bins[tokens], np.bincount(bins, weights=law)) > ALPHA
    assert chi_square(tokens // 1500, np.bincount(np.arange(law.size) // 1500, law)) > ALPHA


def test_penalties_shift_the_law():
    """Catches penalties that are applied after temperature, or to the wrong tokens."""
    params = SamplingParams(
        temperature=0.7, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.6,
        frequency_penalty=0.4, logit_bias={3: 2.0}, seed=1,
    )  # fmt: skip
    logits, prompt, output = some_logits(30), [1, 2, 2, 9], [2, 5, 5, 5, 3]
    edited = reference.edited_logits(logits.tolist(), params, prompt, output)
    state = SamplingState(1, 30)
    state.enter(0, params, 1, 0)
    count = 5_000
    rows = torch.from_numpy(logits).expand(count, -1)
    history = Tokens({0: (prompt, output)})
    tokens = sampler(state).sample(rows, [0] * count, range(count), history).token_ids
    assert chi_square(tokens, reference.law(edited, params)) > ALPHA


def test_successive_draws_are_independent():
    """Catches positions that share noise: pairs of neighbours against the product law."""
    logits = some_logits(6, scale=0.5)
    law = reference.law(logits.astype(np.float64), SamplingParams())
    tokens = draw_many(logits, SamplingParams(seed=8), 10_001).astype(np.int64)
    assert chi_square(tokens[:-1] * 6 + tokens[1:], np.outer(law, law).ravel()) > ALPHA


@st.composite
def filter_params(draw: st.DrawFn) -> SamplingParams:
    # An odd top_p. If tokens tie, a round one can equal a sum of masses but for rounding.
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0, 3.0, 100.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 50, 10_000])),
        top_p=draw(st.one_of(st.just(1.0), st.integers(1, 998).map(lambda n: n / 1000 + 0.00037))),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.037, 0.5, 1.0])),
    )


@examples(150)
@given(filter_params(), st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(1, 90),
       st.sampled_from([0.0, 0.1, 1.0, 6.0]), st.booleans())  # fmt: skip
def test_every_draw_equals_the_reference(params, seed, position, vocab_size, scale, ties):
    """Catches any departure from the definition, ties and flat or sharp laws included."""
    logits = some_logits(vocab_size, seed % 1000, scale)
    if ties:
        logits = np.round(logits)
    logits[:: seed % 7 + 2] = -np.inf
    logits[seed % vocab_size] = 0.25
    law = reference.law(logits.astype(np.float64), params)
    got = sample_rows([logits], [params], seeds=[seed], positions=[position]).token_ids[0]
    assert got == reference.draw(law, seed, 0, position)


@st.composite
def xtc_params(draw: st.DrawFn) -> SamplingParams:
    return replace(
        draw(filter_params()),
        xtc_probability=draw(st.sampled_from([0.31, 0.5, 1.0])),
        xtc_threshold=draw(st.sampled_from([0.0, 0.00031, 0.0513, 0.21, 0.4999, 0.6])),
    )


@examples(150)
@given(xtc_params(), st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(1, 90),
       st.sampled_from([0.1, 1.0, 6.0]), st.booleans(), st.booleans())  # fmt: skip
def test_every_draw_without_top_choices_equals_the_reference(
    params, seed, position, vocab_size, scale, ties, has_mask
):
    """Catches a decision by another random number, one made before the filters or the grammar, or
    one that leaves out a token too many."""
    logits = some_logits(vocab_size, seed % 1000, scale)
    if ties:
        logits = np.round(logits)
    logits[seed % vocab_size] = 0.25
    mask, seen = None, logits.astype(np.float64)
    if has_mask:
        is_allowed = np.arange(vocab_size) % (seed % 3 + 2) == 0
        seen[~is_allowed] = -np.inf
        mask = np.packbits(np.pad(is_allowed, (0, -vocab_size % 32)), bitorder="little")
        mask = mask.view(np.uint32)
    is_out = reference.excludes_top(params, seed, 0, position)
    law = reference.law(seen, params, is_top_excluded=is_out)
    sampled = sample_rows([logits], [params], seeds=[seed], positions=[position], mask=mask)
    assert sampled.token_ids[0] == reference.draw(law, seed, 0, position)


def test_xtc_leaves_out_top_choices_as_often_as_asked():
    """Catches a decision that depends on the noise of the tokens, or that neighbours share."""
    params = SamplingParams(
        xtc_probability=0.4, xtc_threshold=0.1, temperature=1.3, top_k=20, top_p=0.95, seed=5
    )
    logits = some_logits(40)
    laws = [
        reference.law(logits.astype(np.float64), params, is_top_excluded=is_out)
        for is_out in (False, True)
    ]
    assert np.count_nonzero(laws[0]) > np.count_nonzero(laws[1]) > 1
    tokens = draw_many(logits, params, 10_001).astype(np.int64)
    law = 0.6 * laws[0] + 0.4 * laws[1]
    assert chi_square(tokens, law) > ALPHA
    assert chi_square(tokens[:-1] * 40 + tokens[1:], np.outer(law, law).ravel()) > ALPHA


def test_xtc_of_llama_cpp():
    """Four tokens of probabilities 0.4, 0.3, 0.2 and 0.1, as in llama.cpp's own tests."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for threshold, left in ((0.099, [3]), (0.15, [2, 3]), (0.25, [1, 2, 3]), (0.45, [0, 1, 2, 3])):
        params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold, seed=1)
        drawn = draw_many(logits, params, 400)
        assert sorted(set(drawn.tolist())) == left
    greedy = SamplingParams(xtc_probability=1.0, xtc_threshold=0.1, temperature=0)
    assert set(draw_many(logits, greedy, 20).tolist()) == {0}


@examples(40)
@given(st.lists(filter_params() | xtc_params(), min_size=1, max_size=9),
       st.randoms(use_true_random=False), st.sampled_from([5, 300, 40_000]))  # fmt: skip
def test_a_row_is_the_same_in_any_batch(many, random, vocab_size):
    """Catches reductions over more than one row, and state that leaks between slots."""
    many = [replace(params, logprobs=random.choice([None, 0, 3])) for params in many]
    logits = np.stack([some_logits(vocab_size, seed) for seed in range(len(many))])
    seeds = [random.getrandbits(64) for _ in many]
    alone = [
        sample_rows([logits[i]], [many[i]], seeds=[seeds[i]], positions=[i])
        for i in range(len(many))
    ]
    order = random.sample(range(len(many)), len(many))
    together = sample_rows(
        logits[order], [many[i] for i in order], seeds=[seeds[i] for i in order], positions=order
    )
    for row, i in enumerate(order):
        assert together.token_ids[row] == alone[i].token_ids[0]
        assert (row in together.logprobs) == (0 in alone[i].logprobs)
        if row in together.logprobs:
            mine, theirs = together.logprobs[row], alone[i].logprobs[0]
            assert (mine.logprob, mine.rank) == (theirs.logprob, theirs.rank)
            assert mine.top_logprobs.tobytes() == theirs.top_logprobs.tobytes()


@pytest.mark.parametrize("xtc", [0.0, 0.5])
def test_forked_rows_draw_on_their_own(xtc):
    """Catches samples of one prompt that are all alike, and a fork that is not a fresh entry."""
    row = torch.from_numpy(some_logits(50))
    params = SamplingParams(n=8, seed=5, xtc_probability=xtc, xtc_threshold=0.05)
    state = SamplingState(8, 50)
    state.enter(0, params, 5, 0)
    for sample_index in range(1, 8):
        state.fork(0, sample_index, sample_index)
    together = sampler(state).sample(row.expand(8, -1), range(8), [12] * 8, Tokens()).token_ids
    assert len(set(together.tolist())) > 2
    for sample_index in range(8):
        fresh = SamplingState(1, 50)
        fresh.enter(0, params, 5, sample_index)
        alone = sampler(fresh).sample(row[None], [0], [12], Tokens()).token_ids
        assert alone[0] == together[sample_index]


def test_samples_of_one_seed_are_independent():
    """Catches a sample index that is only added to the seed or the position."""
    row = torch.from_numpy(some_logits(6, scale=0.5))
    law = reference.law(row.numpy().astype(np.float64), SamplingParams())
    count = 4_000
    state = SamplingState(2, 6)
    state.enter(0, SamplingParams(), 5, 0)
    state.fork(0, 1, 1)
    first, second = (
        sampler(state)
        .sample(row.expand(count, -1), [slot] * count, range(count), Tokens())
        .token_ids.astype(np.int64)
        for slot in range(2)
    )
    assert chi_square(first * 6 + second, np.outer(law, law).ravel()) > ALPHA


def test_negative_and_unsigned_seed_are_one():
    """Catches a seed that overflows on its way into the noise."""
    logits = [some_logits(500)]
    for seed in (-1, -(2**63), -5):
        signed = sample_rows(logits, [SamplingParams()], seeds=[seed]).token_ids
        assert signed == sample_rows(logits, [SamplingParams()], seeds=[seed + 2**64]).token_ids


def test_greedy_takes_the_smallest_id_among_equals():
    """Catches an argmax whose answer depends on the number of rows or threads."""
    logits = np.zeros((3, 5000), np.float32)
    logits[:, [77, 78, 4999]] = 2.5
    greedy = SamplingParams(temperature=0)
    assert sample_rows(logits, [greedy] * 3).token_ids.tolist() == [77] * 3
    mixed = [greedy, SamplingParams(), replace(greedy, logprobs=1)]
    assert sample_rows(logits, mixed).token_ids[[0, 2]].tolist() == [77, 77]


def test_no_rows_is_a_legal_batch():
    """Catches a crash of an empty step."""
    state = SamplingState(2, 9)
    output = sampler(state).sample(torch.zeros(0, 9), [], [], Tokens())
    assert output.token_ids.shape == (0,)
    assert output.failed == ()


def test_half_precision_logits_are_taken():
    """Catches a sampler that reads bfloat16 memory as float32."""
    state = SamplingState(1, 9)
    state.enter(0, SamplingParams(temperature=0), 0, 0)
    logits = torch.zeros(1, 9, dtype=torch.bfloat16)
    logits[0, 4] = 1
    assert sampler(state).sample(logits, [0], [1], Tokens()).token_ids.tolist() == [4]
