"""Guesses of drafters, from token ids alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.speculation import SpeculationSettings
from quire.plan.speculation import DraftMethods
from quire.plan.speculation.drafter import BestOf, Drafter, NoDrafter, PredictionDrafter
from quire.plan.speculation.history import TokenHistory
from quire.plan.speculation.ngram import NgramDrafter
from quire.plan.speculation.suffix import EarlierAnswers, SuffixDrafter
from quire.protocol import EngineRequest, SamplingParams
from quire.protocol.prediction import PredictionReader
from tests.profiles import examples

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def ngram_by_search(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Find the guess of the definition, looking at every place."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) >= length and tokens[place - length : place] == tokens[-length:]:
                guess: list[int] = []
                while len(guess) < most:
                    at = place + len(guess)
                    guess.append(tokens[at] if at < len(tokens) else guess[at - len(tokens)])
                return guess
    return []


@given(TEXTS, st.integers(1, 6), st.integers(0, 4), st.integers(1, 7), st.data())
@examples(200)
def test_ngram_is_its_definition_however_the_text_arrives(
    tokens: list[int], shortest: int, more: int, most: int, data: st.DataObject
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    for end in sorted(data.draw(st.sets(st.integers(0, len(tokens))))):
        drafter.propose(ints(*tokens[:end]), 0, most)
    expected = ngram_by_search(tokens, shortest, shortest + more, most)
    assert drafter.propose(ints(*tokens), 0, most) == expected


def test_tokens_in_flight_are_guessed_too_and_passed_over() -> None:
    tokens = ints(1, 2, 3, 4, 5, 6, 1, 2)
    assert NgramDrafter(2, 2).propose(tokens, 2, 2) == [5, 6]
    assert SuffixDrafter(EarlierAnswers(), "", 8, 0.1).propose(tokens, 1, 1) == [4]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_loop_is_guessed_beyond_the_end(count: int) -> None:
    assert (
        NgramDrafter(1, 3).propose(ints(8, 9, 8, 9, 8), 0, count) == [9, 8, 9, 8, 9, 8, 9][:count]
    )


@given(TEXTS, st.integers(1, 3))
@examples(50)
def test_a_history_keeps_the_last_places_of_a_run(tokens: list[int], run: int) -> None:
    history = TokenHistory(run)
    history.extend(tokens)
    for place, length in history.matches(tokens, 5):
        assert run <= length <= 5
        assert place < len(tokens)
        assert tokens[place - length : place] == tokens[len(tokens) - length :]


def test_a_run_that_is_everywhere_keeps_few_places() -> None:
    history = TokenHistory(1)
    history.extend([7] * 5000)
    assert len(history.matches([7] * 3, 3)) <= 32
    assert history.matches([7] * 3, 3)[0] == (4999, 3)


# --- suffix ---------------------------------------------------------------------------------------


def test_suffix_follows_the_majority_and_stops_where_it_is_unsure() -> None:
    answers = EarlierAnswers()
    for tail in ([3, 4, 5], [3, 4, 6], [3, 4, 5], [9, 9, 9]):
        answers.add("a", [1, 2, *tail])
    assert SuffixDrafter(answers, "a", 24, 0.1).propose(ints(7, 1, 2), 0, 9) == [3, 4]
    sure = SuffixDrafter(answers, "a", 24, 0.8)
    assert sure.propose(ints(7, 1, 2), 0, 9) == []
    assert SuffixDrafter(answers, "a", 24, 0.8).propose(ints(1, 2, 3), 0, 9) == [4]
    assert SuffixDrafter(answers, "a", 24, 0.5).propose(ints(1, 2, 3), 0, 9) == [4, 5]


def test_suffix_guesses_no_more_than_the_context_that_it_knows() -> None:
    answers = EarlierAnswers()
    answers.add("", list(range(20)))
    for length in (2, 3, 7):
        drafter = SuffixDrafter(answers, "", 24, 0.1)
        tokens = list(range(5, 5 + length))
        assert drafter.propose(ints(*tokens), 0, 9) == list(range(5 + length, 5 + 2 * length))


def test_answers_of_one_tenant_help_no_other() -> None:
    """Turns red when the speed of an answer tells what another tenant was answered."""
    methods = DraftMethods(SpeculationSettings("suffix", 8))

    def guess(salt: str) -> list[int]:
        ids, params = ints(1, 2, 3), SamplingParams(max_tokens=30)
        request = EngineRequest("r", 0, ids, params, 0, salt=salt)
        return methods.drafter(request).propose(ints(1, 2, 3, 11, 12), 0, 4)

    request = EngineRequest("r", 0, ints(5), SamplingParams(), 0, salt="a")
    methods.ended(request, [11, 12, 13, 14, 15])
    assert guess("a") == [13, 14]
    assert guess("b") == guess("") == []


def test_no_guess_crosses_from_one_answer_into_the_next() -> None:
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4])
    answers.add("", [5, 6, 7, 8])
    drafter = SuffixDrafter(answers, "", 24, 0.1)
    assert drafter.propose(ints(1, 2, 3, 4), 0, 4) == []
    assert drafter.propose(ints(1, 2, 3, 4, 5, 6), 0, 4) == [7, 8]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 90)), max_size=60))
@examples(50)
def test_earlier_answers_are_bounded(arrivals: list[tuple[str, int]]) -> None:
    answers = EarlierAnswers(max_tokens=100)
    for salt, length in arrivals:
        answers.add(salt, list(range(length)))
        assert answers.num_tokens <= 100
        assert length <= 2 or len(answers.of(salt)[0].tokens) > min(length, 49)


# --- predictions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "num_accepted", "upcoming"),
    [
        ([1, 2, 3], 3, [4, 5]),
        ([9, 2, 3], 2, [4, 5]),  # another token in place of the first
        ([1, 2, 9, 9, 3, 4, 5], 5, [6, 7]),  # two that were not predicted
        ([1, 4, 5, 6], 4, [7, 8]),  # two left out
        ([1, 2, 3, 4, 5, 6, 7, 8], 8, []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, []),
        ([6, 7, 8, 1, 2, 3], 6, [4, 5]),  # said in another order
    ],
)
def test_an_output_is_followed_through_its_prediction(
    output: list[int], num_accepted: int, upcoming: list[int]
) -> None:
    reader = PredictionReader([1, 2, 3, 4, 5, 6, 7, 8])
    reader.read(output)
    assert reader.num_accepted == num_accepted
    assert reader.num_rejected == 8 - num_accepted
    assert reader.upcoming(0, 2) == upcoming


@given(TEXTS, TEXTS)
@examples(200)
def test_each_predicted_token_is_accepted_or_rejected(said: list[int], text: list[int]) -> None:
    reader = PredictionReader(text)
    reader.read(said)
    assert reader.num_accepted + reader.num_rejected == len(text)
    assert 0 <= reader.num_accepted <= len(text)
    whole = PredictionReader(text)
    whole.read(text)
    assert whole.num_rejected == 0


def test_a_prediction_that_is_used_up_leaves_it_to_the_other_drafter() -> None:
    drafter = PredictionDrafter([4, 5], 3, NgramDrafter(1, 2))
    assert drafter.propose(ints(1, 2, 1), 0, 5) == [4, 5]
    assert drafter.propose(ints(1, 2, 1, 4), 0, 1) == [5]
    assert drafter.propose(ints(1, 2, 1, 4, 5, 1), 0, 2) == [4, 5]
    assert PredictionDrafter([4, 5], 1, NoDrafter()).propose(ints(1, 4, 5), 0, 3) == []


class Says:
    def __init__(self, *guess: int) -> None:
        self._guess = list(guess)

    def propose(self, token_ids: np.ndarray, num_in_flight: int, max_drafts: int) -> list[int]:
        return self._guess[:max_drafts]


def test_the_drafter_that_was_right_guesses() -> None:
    best: Drafter = BestOf([Says(1, 2), Says(3, 3, 3)])
    tokens = [0]
    assert best.propose(ints(*tokens), 0, 4) == [1, 2]
    tokens += [3, 3, 5]
    assert best.propose(ints(*tokens), 0, 4) == [3, 3, 3]
    for _ in range(4):
        tokens += [1, 2, 2]
        best.propose(ints(*tokens), 0, 4)
    assert best.propose(ints(*tokens), 0, 4) == [1, 2]
