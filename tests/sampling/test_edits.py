"""Changes that a request makes to its logits, and rows that fail alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.sampling import NO_TOKEN, reference
from quire.compute.sampling.edits import RowPlace, edit_row, edits_of
from quire.protocol import SamplingParams
from tests.profiles import examples
from tests.sampling.rows import sample_one, sample_rows

V = 20
INF = float("inf")


def greedy(**how: object) -> SamplingParams:
    return SamplingParams(temperature=0, **how)  # type: ignore[arg-type]


def short(params: SamplingParams) -> str:
    return f"temperature {params.temperature} top-p {params.top_p}"


def descending() -> np.ndarray:
    """Token 0 is the best, token V - 1 the worst."""
    return np.arange(V, 0, -1).astype(np.float32)


@st.composite
def edit_params(draw: st.DrawFn) -> SamplingParams:
    ids = st.integers(0, V - 1)
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.1, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 2.0, -0.7])),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=15)),
        bad_words_token_ids=draw(
            st.none() | st.lists(st.lists(ids, min_size=1, max_size=3), max_size=5)
        ),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=draw(st.none() | st.lists(ids, max_size=3)),
    )


@examples(200)
@given(
    edit_params(),
    st.lists(st.integers(0, V - 1), max_size=8),
    st.lists(st.integers(0, V - 1), max_size=8),
    st.sets(st.integers(0, V - 1), max_size=2),
    st.integers(0, 1000),
)
def test_edits_equal_the_reference(params, prompt, output, stops, seed):
    """Catches any wrong ban, penalty or order among them; and a changed source row."""
    row = np.random.default_rng(seed).standard_normal(V).astype(np.float32) * 4
    before = row.copy()
    edits = edits_of(params, stops)
    prompt_ids, output_ids = np.array(prompt, np.int32), np.array(output, np.int32)
    got = edit_row(row, edits, RowPlace(prompt_ids, output_ids))
    expected = reference.edited_logits(row.tolist(), params, prompt, output, sorted(stops))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert (row == before).all()


@st.composite
def dry_params(draw: st.DrawFn) -> SamplingParams:
    token = st.integers(0, 3)
    return SamplingParams(
        dry_multiplier=draw(st.sampled_from([0.0, 0.8, 5.0])),
        dry_base=draw(st.sampled_from([1.0, 1.75, 2.5])),
        dry_allowed_length=draw(st.integers(1, 4)),
        dry_penalty_last_n=draw(st.sampled_from([-1, 0, 1, 5, 12, 100])),
        dry_breaker_token_ids=draw(
            st.none() | st.lists(token | st.lists(token, min_size=1, max_size=3), max_size=3)
        ),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
    )


@examples(400)
@given(
    dry_params(),
    st.lists(st.integers(0, 3), max_size=14),
    st.lists(st.integers(0, 3), max_size=14),
)
def test_ends_of_repetitions_equal_the_reference(params, prompt, output):
    """Catches a repetition that reaches over a breaker or the window, one that is counted too
    short, and a penalty of a breaker."""
    row = descending()
    place = RowPlace(np.array(prompt, np.int32), np.array(output, np.int32))
    got = edit_row(row, edits_of(params, ()), place)
    expected = reference.edited_logits(row.tolist(), params, prompt, output)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def dry(**how: object) -> SamplingParams:
    return greedy(dry_multiplier=1.0, dry_base=2.0, **how)


@pytest.mark.parametrize(
    ("seen", "params", "penalties"),
    [
        ([1, 2, 3, 9, 1, 2], dry(), {3: 1.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(), {4: 2.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_allowed_length=3), {4: 1.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_allowed_length=4), {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_penalty_last_n=6), {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_breaker_token_ids=[1]), {4: 1.0}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_breaker_token_ids=[2]), {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_breaker_token_ids=[4]), {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_breaker_token_ids=[[1, 2]]), {}),
        ([1, 2, 3, 4, 9, 1, 2, 3], dry(dry_breaker_token_ids=[[9, 1]]), {4: 1.0}),
        ([1, 2, 5, 9, 1, 2, 6, 9, 1, 2], dry(), {5: 1.0, 6: 2.0}),
        ([7, 7, 7, 7], dry(), {7: 2.0}),
        ([7], dry(dry_allowed_length=1), {}),
    ],
)
def test_a_token_that_continues_a_repetition_is_penalized(seen, params, penalties):
    """The rules of llama.cpp, of a few sequences by hand; prompt and output are one history."""
    for cut in range(len(seen) + 1):
        place = RowPlace(np.array(seen[:cut], np.int32), np.array(seen[cut:], np.int32))
        lost = descending() - edit_row(descending(), edits_of(params, ()), place)
        assert {token: lost[token] for token in np.flatnonzero(lost).tolist()} == penalties


def test_endless_repetitions_leave_finite_logits_and_cost_little():
    """Catches a factor beyond float32, and a step that compares each pair of tokens."""
    history = np.full(20_000, 7, np.int32)
    for base in (1.0, 1.001, 1.75, 1e6):
        params = greedy(dry_multiplier=1e6, dry_base=base, dry_allowed_length=3)
        started = time.process_time()
        edited = edit_row(descending(), edits_of(params, ()), RowPlace(history, history[:5]))
        assert time.process_time() - started < 5
        assert np.isfinite(edited).all() and edited[7] < -1e5
        assert (np.delete(edited, 7) == np.delete(descending(), 7)).all()


def test_bias_moves_the_choice():
    assert sample_one(descending(), greedy(logit_bias={7: 50.0})).token_ids[0] == 7
    assert sample_one(descending(), greedy(logit_bias={0: -100.0})).token_ids[0] == 1


def test_only_allowed_ids_are_drawn_whatever_the_bias():
    """Catches a bias that lifts a banned token back."""
    params = SamplingParams(allowed_token_ids=[3, 9], logit_bias={5: 100.0}, temperature=5.0)
    drawn = {int(sample_one(descending(), params, seeds=[seed]).token_ids[0]) for seed in range(40)}
    assert drawn == {3, 9}


def test_bad_word_of_one_token_is_always_banned():
    assert sample_one(descending(), greedy(bad_words_token_ids=[[0]])).token_ids[0] == 1


@pytest.mark.parametrize(
    ("output", "expected"), [([4, 5], 1), ([5], 0), ([5, 4], 0), ([], 0), ([9, 4, 5], 1)]
)
def test_bad_word_is_banned_only_after_its_beginning(output, expected):
    """Catches a ban that ignores the order or length of the tokens before."""
    params = greedy(bad_words_token_ids=[[4, 5, 0]])
    assert sample_one(descending(), params, output_ids=output).token_ids[0] == expected


def test_bad_word_does_not_begin_in_the_prompt():
    """The word would not stand in the output, so it is no bad word there (as in vLLM)."""
    params = greedy(bad_words_token_ids=[[4, 0]])
    assert sample_one(descending(), params, prompt_ids=[4]).token_ids[0] == 0


@pytest.mark.parametrize(("length", "expected"), [(0, 2), (2, 2), (3, 0), (9, 0)])
def test_stops_are_banned_until_min_tokens(length, expected):
    """Catches off-by-one, and the request's end-of-sequence ids being forgotten."""
    params = greedy(min_tokens=3, stop_token_ids=[1])
    output = sample_one(descending(), params, output_ids=[19] * length, stop_token_ids=[0])
    assert output.token_ids[0] == expected


def test_repetition_penalty_counts_the_prompt_and_others_do_not():
    """Catches penalties over the wrong half of the history."""
    logits, repetition = descending(), greedy(repetition_penalty=1.5)
    assert sample_one(logits, repetition, prompt_ids=[0]).token_ids[0] == 1
    assert sample_one(logits, repetition, output_ids=[0]).token_ids[0] == 1
    for penalty in (greedy(presence_penalty=2.0), greedy(frequency_penalty=2.0)):
        assert sample_one(logits, penalty, prompt_ids=[0]).token_ids[0] == 0
        assert sample_one(logits, penalty, output_ids=[0]).token_ids[0] == 1


def test_media_placeholders_in_the_prompt_are_not_penalized():
    """Catches an index error when a prompt holds ids beyond the vocabulary."""
    output = sample_one(descending(), greedy(repetition_penalty=1.1), prompt_ids=[V + 5, 3])
    assert output.failed == ()


def test_grammar_mask_has_the_last_word():
    mask = np.array([1 << 6 | 1 << 11], np.uint32)
    params = greedy(logit_bias={5: 100.0, 11: 20.0})
    assert sample_one(descending(), params, mask=mask).token_ids[0] == 11
    assert sample_one(descending(), greedy(), mask=mask).token_ids[0] == 6


def test_processors_run_first_and_in_order():
    """Catches processors that see edited logits, tensors of the wrong kind, or a wrong history."""
    seen: list[object] = []

    def add(tokens, logits):
        seen.append((tokens, logits.dtype, logits[0].item()))
        logits[8] += 50
        return logits

    def double(tokens, logits):
        seen.append(logits[8].item())
        return (logits * 2).to(torch.float64)

    params = greedy(logits_processors=[add, double], logit_bias={0: -100.0, 9: 100.0})
    assert sample_one(descending(), params, output_ids=[4, 2]).token_ids[0] == 8
    assert seen == [([4, 2], torch.float32, V), 12 + 50]


def _raises(tokens, logits):
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (_raises, "raised KeyError"),
        (lambda tokens, logits: None, "returned NoneType"),
        (lambda tokens, logits: logits[:-1], "returned [19]"),
        (lambda tokens, logits: logits * float("nan"), "made a logit nan"),
        (lambda tokens, logits: logits + INF, "made a logit inf"),
        (lambda tokens, logits: logits - INF, "every token is banned"),
    ],
)
def test_a_bad_processor_fails_its_row_alone(processor, words):
    """Catches foreign code that takes the whole step down."""
    rows = np.stack([descending()] * 3)
    bad = SamplingParams(logits_processors=[processor])
    output = sample_rows(rows, [SamplingParams(), bad, greedy(logprobs=1)])
    assert [failure.slot for failure in output.failed] == [1]
    assert words in output.failed[0].message
    assert output.token_ids[1] == NO_TOKEN
    assert output.token_ids[0] == sample_rows(rows[:1], [SamplingParams()]).token_ids[0]
    assert output.token_ids[2] == 0
    assert set(output.logprobs) == {2}


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "params", [greedy(), SamplingParams(), SamplingParams(top_p=0.5)], ids=repr
)
def test_logits_that_are_not_finite_fail_their_row_alone(broken, params):
    """Catches NaN that draws token 0 for ever, and one that reaches other rows."""
    rows = np.stack([descending()] * 3)
    rows[1, 5] = broken
    if broken < 0:
        rows[1] = broken
    output = sample_rows(rows, [params] * 3)
    assert [failure.slot for failure in output.failed] == [1]
    assert "not finite" in output.failed[0].message
    assert output.token_ids[1] == NO_TOKEN
    healthy = sample_rows(rows[[0, 0, 2]], [params] * 3)
    assert output.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()


def test_minus_infinity_is_only_a_ban():
    """Catches a model's own masked tokens being taken for a fault."""
    logits = descending()
    logits[:18] = -np.inf
    assert sample_one(logits, SamplingParams(top_k=5, top_p=0.9)).token_ids[0] in (18, 19)


def test_a_row_with_everything_banned_says_so():
    params = greedy(allowed_token_ids=[3], min_tokens=5, stop_token_ids=[3])
    output = sample_one(descending(), params)
    assert output.token_ids[0] == NO_TOKEN
    assert "every token is banned" in output.failed[0].message


def test_nothing_to_change_means_no_edits():
    """Catches plain requests that leave the fast path."""
    assert edits_of(SamplingParams(stop_token_ids=[3], logit_bias={}), [2]) is None
    assert edits_of(SamplingParams(min_tokens=3), []) is None


def test_a_processors_own_tensor_is_left_alone():
    """Catches later edits that write into a tensor which the processor keeps."""
    kept = torch.from_numpy(descending())

    def replace_logits(tokens, logits):
        return kept

    params = greedy(logits_processors=[replace_logits], logit_bias={9: 100.0})
    assert sample_one(descending(), params).token_ids[0] == 9
    assert kept.tolist() == descending().tolist()
