"""Meaning of the fields of one request together, in `LLM` and over HTTP, with a real engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire import LLM, RequestError, SamplingParams, SchedulingParams
from quire.compute.sampling import SampleOutput, Sampler
from quire.engine.model_front import ModelFront
from quire.protocol import BeamRules
from quire.protocol.outputs import RequestOutput
from quire.protocol.sampling_params import SAMPLING_PARAMETERS
from quire.text.rendering import RenderedPrompt
from tests import waiting
from tests.profiles import examples
from tests.server.in_memory import RealClient
from tests.server.one_request import (
    CHAT,
    END,
    END_TEXT,
    PROMPT,
    SPACE_A,
    TEXT,
    TOOL,
    TOOL_TEXT,
    A,
    B,
    Q,
    post,
)
from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(llm: LLM, front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front, client=RealClient(llm)) as found:
        yield found


def generate(llm: LLM, fields: dict[str, Any]) -> RequestOutput:
    """The fields of a body, as `LLM` takes them. RequestError as `generate` raises it."""
    fields = dict(fields)
    width = fields.pop("best_of", fields.get("n", 1))
    rules = BeamRules(width) if fields.pop("use_beam_search", False) else None
    params = SamplingParams.from_optional({}, **fields)
    prompt, scheduling = RenderedPrompt(PROMPT), [SchedulingParams()]
    return llm._run([prompt], params, scheduling, False, is_single=True, beams=rules)[0]


# --- fields that contradict each other ----------------------------------------------------------


class Pair(NamedTuple):
    """fields: fields of a request that can never be served. names: names of the fields at fault.
    where: routes, and "LLM" if `LLM` takes them."""

    fields: dict[str, Any]
    names: tuple[str, ...]
    where: tuple[str, ...] = (TEXT, CHAT, "LLM")


BEAMS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 4}
PAIRS = (
    Pair({"min_tokens": 5, "max_tokens": 4}, ("min_tokens", "max_tokens")),
    Pair({"min_tokens": 600, "max_tokens": 700}, ("tokens",)),
    Pair({"min_tokens": 600}, ("min_tokens",), (CHAT, TEXT)),
    # bans that leave nothing
    Pair(
        {"allowed_token_ids": [A], "bad_words": ["a"], "max_tokens": 4},
        ("allowed_token_ids", "bad_words"),
    ),
    Pair(
        {"allowed_token_ids": [A, SPACE_A], "bad_words": ["b", "a"], "max_tokens": 4},
        ("allowed_token_ids", "bad_words"),
    ),
    Pair(
        {"allowed_token_ids": [END], "min_tokens": 1, "max_tokens": 4},
        ("allowed_token_ids", "min_tokens"),
    ),
    Pair(
        {"allowed_token_ids": [B], "stop_token_ids": [B], "min_tokens": 4, "max_tokens": 4},
        ("allowed_token_ids", "stop_token_ids", "min_tokens"),
    ),
    Pair(
        {"allowed_token_ids": [TOOL], "stop": TOOL_TEXT, "min_tokens": 2, "max_tokens": 4},
        ("allowed_token_ids", "min_tokens"),
    ),
    Pair(
        {"allowed_token_ids": [A, END], "bad_words": ["a"], "min_tokens": 2, "max_tokens": 4},
        ("allowed_token_ids", "bad_words", "min_tokens"),
    ),
    # beams
    Pair({**BEAMS, "n": 3, "best_of": 2}, ("n is 3", "best_of")),
    Pair({**BEAMS, "n": 2, "top_k": 5}, ("top_k", "use_beam_search")),
    Pair({**BEAMS, "n": 2, "top_p": 0.5}, ("top_p", "use_beam_search")),
    Pair({**BEAMS, "n": 2, "min_p": 0.5}, ("min_p", "use_beam_search")),
    Pair(
        {**BEAMS, "n": 2, "repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
        ("repetition_detection", "use_beam_search"),
    ),
    Pair({**BEAMS, "n": 2, "xtc_probability": 0.5}, ("xtc_probability", "use_beam_search")),
    Pair({**BEAMS, "n": 2, "stop": "."}, ("stop", "use_beam_search")),
    Pair({**BEAMS, "n": 2, "stop": [TOOL_TEXT, "xyz"]}, ("stop", "'xyz'", "use_beam_search")),
    Pair({**BEAMS, "n": 2, "allowed_token_ids": [A]}, ("n is 2", "allowed_token_ids")),
    Pair(
        {**BEAMS, "n": 3, "allowed_token_ids": [A, B], "max_tokens": 1},
        ("n is 3", "allowed_token_ids", "max_tokens"),
    ),
    Pair(
        {**BEAMS, "n": 2, "best_of": 4, "allowed_token_ids": [END]}, ("n is 2", "allowed_token_ids")
    ),
    Pair(
        {**BEAMS, "n": 2, "allowed_token_ids": [A, SPACE_A, B], "bad_words": ["a"]},
        ("n is 2", "allowed_token_ids", "bad_words"),
    ),
    Pair(
        {**BEAMS, "n": 3, "allowed_token_ids": [A, END], "min_tokens": 3},
        ("n is 3", "allowed_token_ids", "min_tokens"),
    ),
    Pair(
        {**BEAMS, "n": 4, "allowed_token_ids": [A, TOOL], "stop": TOOL_TEXT, "max_tokens": 2},
        ("n is 4", "allowed_token_ids", "max_tokens"),
    ),
    Pair({"best_of": 4, "max_tokens": 2}, ("best_of", "use_beam_search"), (TEXT, CHAT)),
    Pair({"length_penalty": 2}, ("length_penalty", "use_beam_search"), (TEXT, CHAT)),
    Pair({"early_stopping": True}, ("early_stopping", "use_beam_search"), (TEXT, CHAT)),
    # the shape of the answer
    Pair({"stop": "x", "detokenize": False}, ("stop", "detokenize"), ("LLM",)),
    Pair({"stream": True, "prompt_logprobs": 1}, ("stream", "prompt_logprobs"), (TEXT, CHAT)),
    Pair({"stream_options": {}}, ("stream_options", "stream is"), (TEXT, CHAT)),
    Pair({"top_logprobs": 2}, ("top_logprobs", "logprobs is"), (CHAT,)),
    Pair({"top_logprobs": 2, "logprobs": False}, ("top_logprobs", "logprobs is"), (CHAT,)),
    Pair({"max_tokens": 0, "echo": False}, ("max_tokens",), (TEXT,)),
    Pair({"max_tokens": 0, "echo": True, "min_tokens": 2}, ("max_tokens", "min_tokens"), (TEXT,)),
    # the prompt
    Pair(
        {"truncate_prompt_tokens": 500, "max_tokens": 100},
        ("truncate_prompt_tokens", "max_tokens"),
        (TEXT, CHAT),
    ),
    Pair(
        {"truncate_prompt_tokens": 500, "min_tokens": 100},
        ("truncate_prompt_tokens", "min_tokens"),
        (TEXT, CHAT),
    ),
    Pair({"truncate_prompt_tokens": 512}, ("truncate_prompt_tokens",), (TEXT, CHAT)),
    Pair(
        {"add_generation_prompt": True, "continue_final_message": True},
        ("add_generation_prompt", "continue_final_message"),
        (CHAT,),
    ),
    Pair(
        {"max_tokens": 2, "max_completion_tokens": 3},
        ("max_tokens", "max_completion_tokens"),
        (CHAT,),
    ),
    Pair(
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        ("reasoning_effort", "chat_template_kwargs"),
        (CHAT,),
    ),
    Pair(
        {"verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}},
        ("verbosity", "chat_template_kwargs"),
        (CHAT,),
    ),
    Pair(
        {"documents": [], "chat_template_kwargs": {"documents": []}},
        ("documents", "chat_template_kwargs"),
        (CHAT,),
    ),
)


def pairs_of(where: str) -> list[Any]:
    return [pytest.param(p.fields, p.names, id=str(p.fields)) for p in PAIRS if where in p.where]


@pytest.fixture
def no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for what is refused."""

    def refuse(*_: object) -> None:
        raise AssertionError("a step was computed")

    monkeypatch.setattr(llm.engine.client._core, "step", refuse)


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(("fields", "names"), pairs_of("LLM"))
def test_contradictions_are_refused_by_an_llm(
    llm: LLM, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        generate(llm, fields)
    assert [name for name in names if name not in str(caught.value)] == [], caught.value


@pytest.mark.usefixtures("no_step")
@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        pytest.param(path, *case.values, id=f"{path} {case.id}")
        for path in (TEXT, CHAT)
        for case in pairs_of(path)
    ],
)
def test_contradictions_are_refused_by_a_server(
    http: httpx.Client, path: str, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    is_open = not {"stream", "stream_options", "prompt_logprobs"} & fields.keys()
    for more in ({}, {"stream": True}) if is_open else ({},):
        reply = post(http, path, {**fields, **more})
        assert reply.status_code == 400, reply.text
        message = reply.json()["error"]["message"]
        assert [name for name in names if name not in message] == [], message


FITTING: tuple[dict[str, Any], ...] = (
    {"min_tokens": 4, "max_tokens": 4},
    {"allowed_token_ids": [END], "max_tokens": 4},
    {"allowed_token_ids": [A], "bad_words": ["aa"], "max_tokens": 1},
    {"allowed_token_ids": [A, END], "min_tokens": 3, "max_tokens": 3},
    {"logit_bias": {str(A): -100}, "allowed_token_ids": [A], "max_tokens": 2},
    {"repetition_penalty": 1e-6, "max_tokens": 4},
    {"repetition_penalty": 1e6, "presence_penalty": 2, "max_tokens": 4},
    {**BEAMS, "n": 4, "allowed_token_ids": [A, B]},
    {**BEAMS, "n": 2, "allowed_token_ids": [A, B], "max_tokens": 1},
    {**BEAMS, "n": 5, "allowed_token_ids": [A, END]},
    {**BEAMS, "n": 1, "best_of": 4, "allowed_token_ids": [END]},
    {**BEAMS, "n": 1, "best_of": 4, "allowed_token_ids": [A]},
    {**BEAMS, "n": 2, "stop": [TOOL_TEXT, END_TEXT]},
    {**BEAMS, "n": 3, "allowed_token_ids": [A, TOOL], "stop": TOOL_TEXT, "max_tokens": 2},
    {**BEAMS, "n": 2, "prompt_logprobs": 1, "frequency_penalty": 1.0, "seed": 3},
)


@pytest.mark.parametrize("fields", FITTING, ids=str)
def test_what_can_be_served_is(llm: LLM, http: httpx.Client, fields: dict[str, Any]) -> None:
    """Turns red when a check of contradictions refuses too much."""
    num_samples = fields.get("n", 1)
    assert len(generate(llm, fields).outputs) == num_samples
    for path in (TEXT, CHAT):
        reply = post(http, path, fields)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == num_samples


def test_every_small_beam_search_is_refused_or_complete(llm: LLM) -> None:
    """The count of what a search can find is the number that it finds."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        fields = {
            "use_beam_search": True,
            "n": int(rng.integers(1, 7)),
            "allowed_token_ids": [A, B, END, TOOL][rng.integers(0, 3) :][: rng.integers(1, 4)],
            "stop_token_ids": [[], [B], [TOOL]][rng.integers(0, 3)],
            "max_tokens": int(rng.integers(1, 5)),
        }
        fields["min_tokens"] = int(rng.integers(0, fields["max_tokens"] + 1))
        fields["best_of"] = fields["n"] + int(rng.integers(0, 2))
        try:
            found = generate(llm, fields)
        except RequestError as error:
            assert " leave " in str(error), fields
            assert "found no more than" not in str(error), fields
        else:
            tokens = {tuple(output.token_ids) for output in found.outputs}
            assert len(tokens) == fields["n"], fields


# --- faults that only a step shows ---------------------------------------------------------------

LATE: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [Q], "bad_words": ["qq"], "max_tokens": 6},
    {"allowed_token_ids": [Q], "bad_words": ["qq"], "max_tokens": 6, "n": 3, "logprobs": 1},
    {"allowed_token_ids": [Q], "bad_words": ["qq"], **BEAMS},
)


@pytest.mark.parametrize("fields", LATE, ids=str)
def test_bans_that_only_the_second_step_shows_are_the_requests_fault(
    llm: LLM, http: httpx.Client, fields: dict[str, Any]
) -> None:
    """The fault is a response, or the last event of a stream that has sent its status."""
    with pytest.raises(RequestError, match=r"banned|bans all"):
        generate(llm, {k: v for k, v in fields.items() if k != "logprobs"})
    reply = post(http, TEXT, fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400), reply.text
    stream = post(http, TEXT, {**fields, "stream": True})
    events = [
        json.loads(line[6:])
        for line in stream.text.split("\n\n")
        if line.startswith('data: {"error"')
    ]
    if stream.status_code == 200:
        assert [event["error"]["code"] for event in events] == [400]
    else:
        assert stream.status_code == 400


def test_a_fault_of_the_model_is_500(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are no numbers are not the request's fault, whatever it bans."""
    sample = Sampler.sample

    def broken(self: Sampler, logits: torch.Tensor, *others: Any) -> SampleOutput:
        return sample(self, logits * torch.nan, *others)

    monkeypatch.setattr(Sampler, "sample", broken)
    reply = post(http, TEXT, {"allowed_token_ids": [A, B], "max_tokens": 2})
    assert reply.status_code == 500, reply.text
    assert "not finite" in reply.json()["error"]["message"]


FIELDS: dict[str, tuple[Any, ...]] = {
    **{
        name: (each.default, *filter(math.isfinite, (each.facts.low, each.facts.high)))
        for name, each in SAMPLING_PARAMETERS.items()
        if each.kind in (int, float) and each.facts.apis != "python"
    },
    "n": (1, 2, 5),
    "best_of": (1, 2, 6),
    "use_beam_search": (True, True, False),
    "max_tokens": (0, 1, 3),
    "min_tokens": (0, 1, 3, 600),
    "allowed_token_ids": ([A], [A, B], [END], [A, END], [Q], [4095], [4096]),
    "bad_words": (["a"], ["qq"], ["a", "b"], [" "], ["<|end|>"]),
    "stop": (".", TOOL_TEXT, [END_TEXT, "a"], "a"),
    "stop_token_ids": ([A], [B, END], [4095]),
    "ignore_eos": (True,),
    "include_stop_str_in_output": (True,),
    "repetition_detection": ({"max_pattern_size": 2, "min_count": 2},),
    "skip_special_tokens": (False,),
    "logit_bias": ({"74": 100}, {"9": -100.0}, {"4095": 100}),
    "logprobs": (0, 2, True),
    "top_logprobs": (2,),
    "prompt_logprobs": (0, 1),
    "temperature": (0, 1e-300, 1e300),
    "top_k": (1, -1, 2**31 - 1),
    "top_p": (1e-300, 0.5),
    "truncate_prompt_tokens": (-1, 1, 600),
    "echo": (True,),
    "stream": (True, False),
    "return_token_ids": (True,),
    "length_penalty": (-10, 10),
    "early_stopping": (True, "never"),
    "deadline_s": (60,),
}


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_fields_together_make_a_fault_of_the_server(
    server: RunningServer, data: st.DataObject
) -> None:
    """Values that are good by themselves, or nearly, are served, or refused with a 4xx."""
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=7, unique=True))
    fields = {"max_tokens": 2} | {name: data.draw(st.sampled_from(FIELDS[name])) for name in names}
    path = data.draw(st.sampled_from([TEXT, CHAT]))
    with waiting.PatientClient(base_url=server.url) as http:
        reply = post(http, path, fields)
    assert reply.status_code in (200, 400), (path, fields, reply.text)
    for line in reply.text.splitlines():
        if line.startswith('data: {"error"'):
            assert json.loads(line[6:])["error"]["code"] == 400, (path, fields, line)
    server.wait_until_idle()


# --- stop strings that are one special token -----------------------------------------------------


def answers(llm: LLM, http: httpx.Client, fields: dict[str, Any]) -> list[tuple[str, Any, int]]:
    """Text, stop reason and number of tokens, from each door."""
    sample = generate(llm, fields).outputs[0]
    assert sample.finish_reason == "stop"
    found = [(sample.text, sample.stop_reason, len(sample.token_ids))]
    whole = post(http, TEXT, fields).json()
    choice = whole["choices"][0]
    found.append((choice["text"], choice["stop_reason"], whole["usage"]["completion_tokens"]))
    stream = post(http, TEXT, {**fields, "stream": True, "stream_options": {"include_usage": True}})
    events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line[6:7] == "{"]
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    found.append((text, events[-2]["choices"][0]["stop_reason"],
                  events[-1]["usage"]["completion_tokens"]))  # fmt: skip
    return found


ENDING_WITH_TOOL: dict[str, Any] = {
    "logit_bias": {str(A): 40, str(TOOL): 100}, "min_tokens": 3, "max_tokens": 12,
    "temperature": 0, "allowed_token_ids": [A, TOOL, END],
}  # fmt: skip
"""Three tokens "a", and then the special one, if that is banned till then."""


@pytest.mark.parametrize("shows_special", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": TOOL_TEXT}, "aaa", TOOL_TEXT),
        ({"stop": [TOOL_TEXT]}, "aaa", TOOL_TEXT),
        ({"stop": ["xyz", TOOL_TEXT, "aaaaaa"]}, "aaa", TOOL_TEXT),
        ({"stop": TOOL_TEXT, "include_stop_str_in_output": True}, "aaa" + TOOL_TEXT, TOOL_TEXT),
        ({"stop": [TOOL_TEXT, END_TEXT], "ignore_eos": True}, "aaa", TOOL_TEXT),
        ({"stop": TOOL_TEXT, "stop_token_ids": [TOOL]}, "aaa", TOOL_TEXT),
        ({"stop": [TOOL_TEXT, "aa"], "min_tokens": 1, "logit_bias": {}}, None, None),
    ],
    ids=str,
)
def test_a_special_token_as_stop_string_ends_an_answer(
    llm: LLM,
    http: httpx.Client,
    fields: dict[str, Any],
    text: str | None,
    reason: str | None,
    shows_special: bool,
) -> None:
    """Also where its text is never shown, and the same from all doors."""
    asked = {**ENDING_WITH_TOOL, "skip_special_tokens": not shows_special, **fields}
    found = answers(llm, http, asked)
    assert found == [found[0]] * 3
    if text is not None:
        assert found[0] == (text, reason, 4)


def test_the_end_token_as_stop_string_holds_with_ignore_eos(llm: LLM, http: httpx.Client) -> None:
    for ignores in (True, False):
        fields = {
            "allowed_token_ids": [END], "stop": END_TEXT, "ignore_eos": ignores, "max_tokens": 5,
        }  # fmt: skip
        assert answers(llm, http, fields) == [("", END_TEXT, 1)] * 3


def test_min_tokens_bans_the_token_of_a_stop_string(llm: LLM, http: httpx.Client) -> None:
    """It is banned like all other ends of the answer, and not for longer."""
    for least in (0, 1, 5):
        found = answers(llm, http, {**ENDING_WITH_TOOL, "stop": TOOL_TEXT, "min_tokens": least})
        assert found == [("a" * least, TOOL_TEXT, least + 1)] * 3


def test_text_that_was_held_back_comes_before_the_stop(llm: LLM, http: httpx.Client) -> None:
    """Text that could have become another stop string is shown once the token has come."""
    fields = {**ENDING_WITH_TOOL, "stop": ["aaaa!", TOOL_TEXT], "include_stop_str_in_output": True}
    assert answers(llm, http, fields) == [("aaa" + TOOL_TEXT, TOOL_TEXT, 4)] * 3


@pytest.mark.parametrize("include", [False, True])
def test_beams_end_by_stop_strings_that_are_tokens(
    llm: LLM, http: httpx.Client, include: bool
) -> None:
    fields: dict[str, Any] = {
        "use_beam_search": True, "n": 3, "allowed_token_ids": [A, TOOL], "max_tokens": 2,
        "stop": TOOL_TEXT, "include_stop_str_in_output": include,
    }  # fmt: skip
    end = TOOL_TEXT if include else ""
    ended = {("a" + end, "stop", TOOL_TEXT), (end, "stop", TOOL_TEXT)}
    samples = generate(llm, fields).outputs
    found = {(s.text, s.finish_reason, s.stop_reason) for s in samples}
    assert found == {("aa", "length", None), *ended}
    choices = post(http, TEXT, fields).json()["choices"]
    assert {(c["text"], c["finish_reason"], c["stop_reason"]) for c in choices} == found


def test_ordinary_tokens_and_unknown_texts_stay_texts(llm: LLM) -> None:
    """A stop string that is a token of the vocabulary, but no special one, is matched on text."""
    fields = {**ENDING_WITH_TOOL, "allowed_token_ids": [SPACE_A, A], "max_tokens": 6}
    fields |= {"min_tokens": 0, "logit_bias": {str(SPACE_A): 100}}
    (sample,) = generate(llm, {**fields, "stop": ["a", "<|no_such|>"]}).outputs
    assert (sample.text, sample.stop_reason, sample.token_ids) == (" ", "a", [SPACE_A])


# --- outputs that repeat themselves ---------------------------------------------------------------


def test_a_repetition_does_not_go_on_but_over_its_breakers(server: RunningServer) -> None:
    """Turns red when a door loses DRY's parameters, or its texts reach the engine as other tokens
    than those that write them."""
    asked: dict[str, Any] = {
        "logit_bias": {str(A): 100}, "max_tokens": 12, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    dry = {"dry_multiplier": 1e6, "dry_allowed_length": 2}
    kinds: list[dict[str, Any]] = [dry, {**dry, "dry_sequence_breakers": ["a"]}]
    with waiting.PatientClient(base_url=server.url) as http:
        for path in (TEXT, CHAT):
            replies = [post(http, path, {**asked, **kind}).json()["choices"][0] for kind in kinds]
            texts = [each.get("text") or each["message"]["content"] for each in replies]
            assert "a" * 4 not in texts[0] and texts[0].count("a") >= 6
            assert texts[1] == "a" * 12
    server.wait_until_idle()


def test_an_output_that_repeats_itself_ends(server: RunningServer) -> None:
    """Turns red when a loop goes on to max_tokens, or an API says another reason."""
    loop = {"max_pattern_size": 1, "min_count": 3}
    asked = {"logit_bias": {str(A): 100}, "max_tokens": 40, "temperature": 0}
    with waiting.PatientClient(base_url=server.url) as http:
        for path, given in (
            (TEXT, {"prompt": "x"}),
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ):
            body = {**asked, **given, "repetition_detection": loop}
            reply = http.post(path, json=body).json()
            (choice,) = reply["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                "repetition",
                "repetition_detected",
            )
            assert reply["usage"]["completion_tokens"] == 3
            late = http.post(path, json={**body, "min_tokens": 7}).json()
            assert late["usage"]["completion_tokens"] == 7
            reply = http.post(path, json={**body, "repetition_detection": {"min_count": 1, "x": 2}})
            assert reply.status_code == 400
            assert "repetition_detection.x is no field" in reply.json()["error"]["message"]
    server.wait_until_idle()
