"""OpenAI's `prediction`: text or parts, counted in the usage, and no change of the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.engine.model_front import ModelFront
from quire.protocol.prediction import PredictionReader

MESSAGES = [{"role": "user", "content": "Say it again."}]


def chat(http: httpx.Client, **more: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True, "seed": 3, **more}
    reply = http.post("/v1/chat/completions", json={"return_token_ids": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def details(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def expected(front: ModelFront, text: str, *outputs: list[int]) -> tuple[int, int]:
    tokenizer = front.renderer.tokenizer
    assert tokenizer is not None
    readers = [PredictionReader(tokenizer.encode(text, add_special_tokens=False)) for _ in outputs]
    for reader, output in zip(readers, outputs, strict=True):
        reader.read(output)
    return sum(r.num_accepted for r in readers), sum(r.num_rejected for r in readers)


@pytest.mark.parametrize("n", [1, 2])
def test_a_prediction_is_counted_and_changes_nothing(
    http: httpx.Client, front: ModelFront, n: int
) -> None:
    plain = chat(http, n=n)
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["message"]["content"]
    halves = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, halves):
        found = chat(http, n=n, prediction={"type": "content", "content": content})
        assert found["choices"] == plain["choices"]
        outputs = [choice["token_ids"] for choice in found["choices"]]
        assert details(found) == expected(front, text, *outputs)
        assert details(found)[0] > 5
        assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("text", ["Something else that nobody says.", "", "x"])
def test_a_wrong_prediction_is_rejected(http: httpx.Client, front: ModelFront, text: str) -> None:
    plain = chat(http)
    found = chat(http, prediction={"type": "content", "content": text})
    assert found["choices"] == plain["choices"]
    if text:
        assert details(found) == expected(front, text, found["choices"][0]["token_ids"])
        assert details(found)[1] > 0


def test_a_stream_and_the_timeline_say_the_same(http: httpx.Client) -> None:
    text = chat(http)["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": text + " and more that does not come"}
    whole = chat(http, prediction=prediction, return_timeline=True)
    timeline = whole["timeline"]
    assert details(whole) == (
        timeline["num_accepted_prediction_tokens"],
        timeline["num_rejected_prediction_tokens"],
    )
    body = {
        "messages": MESSAGES, "max_tokens": 24, "ignore_eos": True, "seed": 3, "stream": True,
        "stream_options": {"include_usage": True}, "prediction": prediction,
    }  # fmt: skip
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    assert details(last) == details(whole)


@pytest.mark.parametrize(
    ("prediction", "match"),
    [
        ({"type": "file", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction"),
        ({"type": "content", "content": 3}, "prediction.content"),
        (
            {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
            "prediction.content",
        ),
        ({"type": "content", "content": "a", "more": 1}, "prediction"),
        ("text", "prediction"),
        ({"type": "content", "content": "a" * 10**6}, "prediction has 1000000 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_prediction_is_refused(http: httpx.Client, prediction: Any, match: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "prediction": prediction}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert match in reply.json()["error"]["message"]


def test_completions_have_no_predictions(http: httpx.Client) -> None:
    prediction = {"type": "content", "content": "a"}
    reply = http.post("/v1/completions", json={"prompt": "a", "prediction": prediction})
    assert reply.status_code == 400
    assert "predicted outputs are offered for chats" in reply.json()["error"]["message"]
