"""Token ids in and out, over HTTP: the same tokens as completions, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.running import MODEL

ROUTE = "/inference/v1/generate"
IDS = [5, 6, 7, 8]


def post(http: httpx.Client, sampling: dict[str, Any], **body: Any) -> dict[str, Any]:
    reply = http.post(ROUTE, json={"token_ids": IDS, "sampling_params": sampling, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(http: httpx.Client, sampling: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    asked = {"token_ids": IDS, "sampling_params": sampling, "stream": True, **body}
    with http.stream("POST", ROUTE, json=asked) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert reply.status_code == 200 and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_the_tokens_are_those_of_completions(http: httpx.Client) -> None:
    sampling = {"max_tokens": 9, "seed": 3, "n": 2}
    found = post(http, sampling)
    body = {"prompt": IDS, "return_token_ids": True, **sampling}
    expected = http.post("/v1/completions", json=body).json()
    assert [each["token_ids"] for each in found["choices"]] == [
        each["token_ids"] for each in expected["choices"]
    ]
    assert [each["finish_reason"] for each in found["choices"]] == ["length", "length"]
    assert found["usage"] == expected["usage"] | {
        "prompt_tokens_details": found["usage"]["prompt_tokens_details"]
    }


def test_a_stream_has_the_same_tokens(http: httpx.Client) -> None:
    sampling = {"max_tokens": 9, "seed": 3, "n": 2, "logprobs": 1}
    whole = post(http, sampling, request_id="mine")
    events = streamed(http, sampling, stream_options={"include_usage": True}, request_id="mine")
    assert {event["request_id"] for event in events} == {"mine", whole["request_id"]}
    ids: list[list[int]] = [[], []]
    logprobs: list[list[Any]] = [[], []]
    ends: list[str | None] = [None, None]
    *pieces, last = events
    for event in pieces:
        for choice in event["choices"]:
            index = choice["index"]
            assert ends[index] is None
            ids[index] += choice["token_ids"]
            logprobs[index] += choice["logprobs"]["content"]
            ends[index] = choice["finish_reason"]
    choices = whole["choices"]
    assert ids == [choice["token_ids"] for choice in choices]
    assert logprobs == [choice["logprobs"]["content"] for choice in choices]
    assert ends == [choice["finish_reason"] for choice in choices]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 18


def test_log_probabilities_of_the_prompt(http: httpx.Client) -> None:
    found = post(http, {"max_tokens": 1, "prompt_logprobs": 1})
    assert found["prompt_logprobs"][0] is None
    entries = zip(IDS[1:], found["prompt_logprobs"][1:], strict=True)
    assert all(str(token) in entry for token, entry in entries)


def test_stop_strings_end_it_too(http: httpx.Client) -> None:
    text = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 30, "seed": 1}).json()
    stop = text["choices"][0]["text"][10:13]
    (choice,) = post(http, {"max_tokens": 30, "seed": 1, "stop": stop})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert 0 < len(choice["token_ids"]) < 30


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"token_ids": [9999]}, "outside the vocabulary"),
        ({"token_ids": "x"}, "token_ids: expected array"),
        ({"token_ids": IDS, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": IDS, "sampling_params": {"prompt": "x"}}, "token_ids are the prompt"),
        ({"token_ids": IDS, "sampling_params": {"odd": 1}}, "odd"),
        ({"token_ids": IDS, "sampling_params": {"priority": 1}}, "priority is given within"),
        ({"token_ids": IDS, "sampling_params": {"stream": False}}, "Send it beside"),
        ({"token_ids": IDS, "odd": 1}, "There is no field 'odd'"),
        ({"token_ids": IDS, "model": "absent"}, "does not exist"),
        ({"token_ids": IDS * 200}, "maximum context length"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = http.post(ROUTE, json={"model": MODEL, **body})
    assert reply.status_code == (404 if "exist" in words else 400)
    assert words in reply.json()["error"]["message"]


RENDER = "/v1/completions/render"


def test_a_rendered_completion_generates_what_the_completion_does(http: httpx.Client) -> None:
    """Fault: a front that renders here and generates elsewhere gets other tokens."""
    prompts = ["def main():", "import "]
    body = {
        "prompt": prompts, "model": MODEL, "max_tokens": 7, "seed": 3, "temperature": 0.7,
        "stop": ["zzz"], "truncate_prompt_tokens": 3, "cache_salt": "mine", "stream": False,
    }  # fmt: skip
    reply = http.post(RENDER, json=body)
    assert reply.status_code == 200, reply.text
    rendered = reply.json()
    expected = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    for each, choice in zip(rendered, expected["choices"], strict=True):
        assert each["token_ids"] == choice["prompt_token_ids"] and len(each["token_ids"]) == 3
        assert each["model"] == MODEL and each["cache_salt"] == "mine"
        assert each["request_id"].startswith("cmpl-")
        (made,) = http.post(ROUTE, json=each).json()["choices"]
        assert made["token_ids"] == choice["token_ids"]
    assert len({each["request_id"] for each in rendered}) == 2
    assert rendered[0]["sampling_params"] == {
        "max_tokens": 7, "seed": 3, "temperature": 0.7, "stop": ["zzz"]
    }  # fmt: skip


def test_a_rendered_completion_has_the_defaults_of_completions(http: httpx.Client) -> None:
    longest = "r" * 128
    (found,) = http.post(RENDER, json={"prompt": IDS, "request_id": longest}).json()
    assert found["token_ids"] == IDS and found["model"] == MODEL
    assert found["sampling_params"] == {"max_tokens": 16}
    assert len(http.post(ROUTE, json=found).json()["choices"][0]["token_ids"]) == 16
    streamed = {"prompt": IDS, "stream": True, "stream_options": {"include_usage": True}}
    (found,) = http.post(RENDER, json=streamed).json()
    with http.stream("POST", ROUTE, json=found) as reply:
        assert [line for line in reply.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": IDS, "echo": True}, "echo", "Leave it out"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "no token ids"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": IDS, "model": "none"}, "model", "none"),
        ({"prompt": IDS, "temperature": -1}, "temperature", "temperature"),
        ({"prompt": [7] * 600}, None, "maximum context length"),
        ({"prompt": IDS, "max_tokens": 5000}, "max_tokens", "maximum context length"),
        ({"prompt": [9999]}, "prompt", "outside the vocabulary"),
    ],
    ids=str,
)
def test_what_cannot_be_rendered_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str | None, words: str
) -> None:
    reply = http.post(RENDER, json=body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404) and words in error["message"], reply.text
    assert error["param"] == param
