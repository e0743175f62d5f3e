"""Every parameter is checked on construction, and the message says what, the value, what to do."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.protocol import SamplingParams, SchedulingParams
from quire.protocol.adapters import LoRARequest
from quire.protocol.beam_search import BeamSearchParams
from quire.protocol.sampling_params import MAX_SAMPLES, RequestOutputKind, check_vocabulary

NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, list[object]]] = [
    ("n", [0, -1, MAX_SAMPLES + 1, 10**9, True, 1.0, "2", None]),
    ("temperature", [-0.1, NAN, INF, -INF, True, "1", None, [1], 10**400]),
    ("top_p", [-0.1, 1.0001, NAN, INF, True, "1", None]),
    ("top_k", [-2, 0.5, True, None, "5", 2**31]),
    ("min_p", [-0.001, 1.001, NAN, True, None]),
    ("seed", [-(2**63) - 1, 2**64, 1.5, True, "7", NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, False, None]),
    ("frequency_penalty", [-2.1, 2.1, NAN, INF, False, None]),
    ("repetition_penalty", [0, 0.0, -1, NAN, INF, True, None]),
    ("logit_bias", [[1], "1", {1: NAN}, {1: INF}, {1: 101}, {1: True}, {"a": 1}, {-1: 1}, {"-1": 1},
                    {1.0: 1}, {True: 1}, {"1": 1, 1: 2}, {"9" * 5000: 1}, {"²": 1}, {1: "2"}]),
    ("allowed_token_ids", [[], 5, "12", [-1], [True], [1.0], ["1"], {1: 2}]),
    ("bad_words", ["word", [""], [1], [None], 3, ["\ud800"]]),
    ("bad_words_token_ids", [[[]], [1], [["a"]], [[-1]], [[True]], "ab"]),
    ("max_tokens", [0, -1, True, 1.5, "5", 2**31]),
    ("min_tokens", [-1, True, 0.5, None, 17]),
    ("repetition_detection", [5, [1, 2, 3], {"min_count": 2, "size": 1}, {"max_pattern_size": 2},
                              {"max_pattern_size": 1, "min_count": 1},
                              {"max_pattern_size": 1025, "min_count": 2},
                              {"max_pattern_size": True, "min_count": 2},
                              {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}]),
    ("stop", ["", [""], ["a", ""], [1], 5, {"a": 1}, b"a", "\ud800", ["a\udfff"]]),
    ("stop_token_ids", [5, "12", [-1], [True], [0.5]]),
    ("logprobs", [-2, 1025, True, 1.5, "1"]),
    ("prompt_logprobs", [-2, 1025, True, 1.5, "1"]),
    ("logits_processors", [[5], 5, "f", [None]]),
    ("detokenize", [0, 1, None, "true"]),
    ("ignore_eos", [0, 1, None]),
    ("include_stop_str_in_output", [0, None]),
    ("skip_special_tokens", [1, None]),
    ("spaces_between_special_tokens", [1, None]),
    ("truncate_prompt_tokens", [0, -2, 1.5, True, "5"]),
    ("xtc_probability", [-0.1, 1.1, NAN, True, None, "1"]),
    ("xtc_threshold", [-0.1, 1.1, NAN, True, None]),
    ("dry_multiplier", [-0.1, NAN, INF, 1e7, True, None]),
    ("dry_base", [0.99, 0, NAN, INF, 1e7, True, None]),
    ("dry_allowed_length", [0, -1, 1025, 1.5, True, None]),
    ("dry_penalty_last_n", [-2, 1.5, True, None, 2**31]),
    ("dry_sequence_breakers", ["ab", [""], [1], 5, ["x"] * 17, ["x" * 41], ["\ud800"]]),
    ("dry_breaker_token_ids", [5, "ab", [[]], ["a"], [-1], [True], [[1, -1]], {1: 2}]),
    ("output_kind", ["delta", None, 3, "0"]),
    ("best_of", [2, "x"]),
    ("structured_outputs", [{"json": {}}, object]),
    ("guided_decoding", [{"regex": "a"}]),
    ("extra_args", [{"a": 1}]),
    ("use_beam_search", [True]),
    ("max_token", [None, 3]),
    ("zzz", [None, 3]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD for value in values]
)
def test_bad_values_are_refused_by_name(name, value):
    """Catches an unchecked type or bound, and a message that does not name its parameter."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert len(message) < 400
    assert message.endswith((".", ")."))


GOOD: list[tuple[str, list[object]]] = [
    ("n", [1, MAX_SAMPLES, np.int64(3)]),
    ("temperature", [0, 0.0, 1e-9, 2, 1e308, np.float32(0.5)]),
    ("top_p", [0, 1, 1.0, 1e-12]),
    ("top_k", [-1, 0, 1, 2**31 - 1]),
    ("min_p", [0, 1]),
    ("seed", [None, 0, -(2**63), 2**64 - 1]),
    ("repetition_penalty", [1e-3, 100]),
    ("logit_bias", [None, {}, {0: -100}, {"50256": 100.0}]),
    ("allowed_token_ids", [None, [1], (1, 2), range(3), np.array([4])]),
    ("bad_words", [None, [], ["a b"]]),
    ("stop", [None, [], "a", ["a", "b"], ("a",)]),
    ("max_tokens", [None, 1]),
    ("logprobs", [None, -1, 0, 20]),
    ("logits_processors", [None, [], [lambda tokens, logits: logits]]),
    ("truncate_prompt_tokens", [None, -1, 1, 2**31 - 1]),
    ("dry_sequence_breakers", [None, [], ["x" * 40] * 16]),
    ("dry_breaker_token_ids", [None, [], [1, [2, 3]], np.array([4]), ((5,), 6)]),
    ("output_kind", [*RequestOutputKind, 1]),
    ("best_of", [None, 1]),
    ("structured_outputs", [None]),
    ("extra_args", [None, {}]),
    ("use_beam_search", [False, None]),
    ("length_penalty", [1.0, None]),
    ("skip_clone", [True, False]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD for value in values]
)
def test_good_values_are_taken(name, value):
    """Catches a bound that is too strict; and `replace` refusing what was normalised."""
    params = SamplingParams(**{name: value})
    assert replace(params) == params


def test_others_are_made_and_none_is_changed():
    params = SamplingParams(temperature=0.5, stop="a")
    assert params.clone() == params and params.clone() is not params
    assert params.clone(max_tokens=3) == replace(params, max_tokens=3) != params
    with pytest.raises(RequestError, match="max_tokens is 0"):
        params.clone(max_tokens=0)
    for name in ("max_tokens", "no_such_field"):
        with pytest.raises(AttributeError, match=rf"use dataclasses.replace\(params, {name}=…\)"):
            setattr(params, name, 5)
    beams = BeamSearchParams(beam_width=2, include_stop_str_in_output=False)
    assert beams.clone(beam_width=3).beam_width == 3
    with pytest.raises(RequestError, match="n=3 cannot be served: beam_width says"):
        BeamSearchParams(beam_width=2, n=3)


def test_normal_forms():
    params = SamplingParams(
        stop="END", stop_token_ids=[2, 1], logit_bias={"7": 1}, bad_words=["x"],
        bad_words_token_ids=[[1, 2]], temperature=1, seed=-1,
    )  # fmt: skip
    assert params.stop == params.stop_strings == ("END",)
    assert params.stop_token_ids == (2, 1)
    assert params.logit_bias == {7: 1.0}
    assert params.bad_words_token_ids == ((1, 2),)
    assert type(params.temperature) is float
    assert params.seed is None
    assert SamplingParams().stop == ()
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_callers_lists_are_not_kept():
    """Catches a request that changes when its sender reuses a list."""
    bias, stop = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2] = 5.0
    stop.append("b")
    assert params.logit_bias == {1: 1.0}
    assert params.stop == ("a",)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=9.9e-6), True),
        (SamplingParams(temperature=1e-5), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(), False),
    ],
)
def test_what_counts_as_greedy(params, greedy):
    assert params.is_greedy is greedy


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: SchedulingParams(tenant="\ud800"),
        lambda: SchedulingParams(tenant=5),  # type: ignore[arg-type]
        lambda: LoRARequest("\ud800", 1, "/folder"),
    ],
)
def test_names_can_be_written_as_bytes(make):
    """Catches an encoding error within the engine, which takes other requests with it."""
    with pytest.raises(RequestError, match=r"(tenant|lora_name) is ('\\ud800'|5)"):
        make()


def test_stop_needs_text():
    """Catches a stop string that could never match, silently."""
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_huge_values_are_not_echoed():
    """Catches a message as long as the request."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=[["x" * 100_000]])  # type: ignore[list-item]
    assert len(str(caught.value)) < 400


def test_from_optional_fills_in_defaults():
    """Catches an explicit 0 that is taken for "not given"."""
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    params = SamplingParams.from_optional(defaults, temperature=None, top_k=0, n=2)
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.6, 0.9, 0, 2)
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(RequestError, match="best_off=3 is not a sampling parameter"):
        SamplingParams.from_optional(best_off=3)


@pytest.mark.parametrize(
    "how",
    [
        {"logit_bias": {100: 1.0}},
        {"allowed_token_ids": [1, 100]},
        {"stop_token_ids": [100]},
        {"bad_words_token_ids": [[1], [2, 100]]},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(how):
    params = SamplingParams(**how)
    check_vocabulary(params, 101)
    with pytest.raises(RequestError, match="token id 100") as caught:
        check_vocabulary(params, 100)
    assert next(iter(how)) in str(caught.value)
    assert "0 to 99" in str(caught.value)


def test_bad_words_must_have_been_spelled():
    """Catches bad words that are silently allowed because nobody tokenized them."""
    params = SamplingParams(bad_words=["no"])
    with pytest.raises(RequestError, match="no tokenizer"):
        check_vocabulary(params, 100)
    check_vocabulary(replace(params, bad_words_token_ids=[[5]]), 100)
