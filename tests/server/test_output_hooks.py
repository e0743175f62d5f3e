"""Output hooks over HTTP: an output that a hook ends, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import MODEL, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_end_is_content_filter(http: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 20, "seed": 3, "return_token_ids": True}
    plain = http.post(path, json=body).json()["choices"][0]
    body["hooks"] = ["three"]
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "content_filter"
    assert choice["token_ids"] == plain["token_ids"][:3]
    assert reply.json()["usage"]["completion_tokens"] == 3
    tokens: list[int] = []
    reasons: list[str] = []
    with http.stream("POST", path, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])["choices"][0]
                tokens += piece.get("token_ids") or []
                reasons += [piece["finish_reason"]] if piece["finish_reason"] else []
    assert tokens == choice["token_ids"]
    assert reasons == ["content_filter"]


def test_the_sdk_reads_it(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        found = sdk.chat.completions.create(
            model=MODEL, messages=BODIES[CHAT]["messages"], n=2, extra_body={"hooks": ["three"]}
        )
        assert [choice.finish_reason for choice in found.choices] == ["content_filter"] * 2


@pytest.mark.parametrize(
    ("hooks", "sentence"),
    [
        (["wild"], "does not offer"),
        ([""], "texts of at least one character"),
        (["three"] * 17, "max_hooks"),
        ("three", "hooks"),
    ],
)
def test_bad_names_are_refused(http: httpx.Client, hooks: Any, sentence: str) -> None:
    reply = http.post(TEXT, json={**BODIES[TEXT], "hooks": hooks})
    assert reply.status_code == 400, reply.text
    assert sentence in reply.json()["error"]["message"]
