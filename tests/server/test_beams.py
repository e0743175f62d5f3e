"""Beam search over HTTP gives the sequences that the engine finds, whole or as a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np

from quire.protocol import BeamRules
from tests.executor.fake import FakeModel
from tests.scheduler.beam_reference import search
from tests.server.in_memory import VOCAB_SIZE

PROMPT = [5, 6, 7, 8]
BODY: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 6, "use_beam_search": True, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip


def complete(http: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    reply = http.post("/v1/completions", json={**BODY, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def expected(rules: BeamRules) -> list[tuple[int, ...]]:
    model = FakeModel((None,), VOCAB_SIZE)

    def scores(tokens: tuple[int, ...]) -> np.ndarray:
        return model.expected_scores(tokens)

    return [one.tokens for one in search(scores, PROMPT, rules, max_tokens=6).found]


def test_gives_the_best_sequences_found(http: httpx.Client) -> None:
    choices = complete(http, n=2, best_of=4, length_penalty=0.5)
    found = expected(BeamRules(4, 0.5))
    assert [tuple(choice["token_ids"]) for choice in choices] == found[:2]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]


def test_n_alone_is_the_width(http: httpx.Client) -> None:
    choices = complete(http, n=3, logprobs=0)
    assert [tuple(choice["token_ids"]) for choice in choices] == expected(BeamRules(3))
    for choice in choices:
        assert len(choice["logprobs"]["token_logprobs"]) == 6


def test_a_stream_ends_with_the_whole_result(http: httpx.Client) -> None:
    """One chunk per sequence, when the search has ended."""
    pieces: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    with http.stream("POST", "/v1/completions", json={**BODY, "n": 2, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    assert choice["index"] not in pieces
                    pieces[choice["index"]] = choice["token_ids"]
                    texts[choice["index"]] = choice["text"]
                    assert choice["finish_reason"] == "length"
    whole = complete(http, n=2)
    assert [pieces[i] for i in range(2)] == [choice["token_ids"] for choice in whole]
    assert [texts[i] for i in range(2)] == [choice["text"] for choice in whole]


def test_a_chat_takes_it_too(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "n": 2,
        "use_beam_search": True, "early_stopping": "never", "ignore_eos": True,
    }  # fmt: skip
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 10
