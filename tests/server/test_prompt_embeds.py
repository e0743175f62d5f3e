"""/v1/completions with `prompt_embeds`: the tokens of ids, or an error of the request alone."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from quire import LLM
from quire.engine.model_front import ModelFront
from tests import waiting
from tests.server.in_memory import RealClient
from tests.server.running import RunningServer, running_server

IDS = list(range(5, 30))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        enable_prompt_embeds=True,
        quiet=True,
        dtype="float32",
        num_kv_blocks=64,
        block_size=16,
        max_model_len=256,
        max_num_batched_tokens=64,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(front: ModelFront, llm: LLM) -> Iterator[RunningServer]:
    with running_server(front, client=RealClient(llm)) as found:
        yield found


@pytest.fixture
def http(served: RunningServer, llm: LLM) -> Iterator[httpx.Client]:
    """Nothing that was sent may be left in the engine."""
    with waiting.PatientClient(base_url=served.url) as client:
        yield client
    served.wait_until_idle()
    worker = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
    waiting.wait_for(lambda: not worker._media._rows, "end of the embeddings")


def rows(llm: LLM, ids: list[int] = IDS) -> torch.Tensor:
    worker = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
    with torch.inference_mode():
        return worker._loaded.model.embed(torch.tensor(ids, dtype=torch.int32)).clone()


def encoded(tensor: Any) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"max_tokens": 6, "temperature": 0, **body})


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_embeddings_give_the_tokens_of_their_ids(http: httpx.Client, llm: LLM) -> None:
    expected = post(http, prompt=IDS, return_token_ids=True).json()["choices"][0]["token_ids"]
    stored = safetensors.torch.save({"prompt_embeds": rows(llm)})
    for embeds in (encoded(rows(llm)), base64.b64encode(stored).decode()):
        response = post(http, prompt_embeds=embeds, return_token_ids=True)
        choice = response.json()["choices"][0]
        assert choice["token_ids"] == expected
        assert choice["prompt_token_ids"] == [0] * len(IDS)
        assert response.json()["usage"]["prompt_tokens"] == len(IDS)


def test_streams_samples_and_logprobs(http: httpx.Client, llm: LLM) -> None:
    embeds = encoded(rows(llm))
    whole = post(http, prompt_embeds=embeds, n=2, logprobs=1, temperature=0.8, seed=3)
    chunks = [
        json.loads(line[6:])
        for line in post(
            http, prompt_embeds=embeds, n=2, logprobs=1, temperature=0.8, seed=3, stream=True
        ).text.splitlines()
        if line.startswith("data: {")
    ]
    streamed = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts(whole)


def test_embeddings_come_before_texts(http: httpx.Client, llm: LLM) -> None:
    """The order is vLLM's. An empty text beside embeddings is none: OpenAI's client must send
    one."""
    one, other = rows(llm), rows(llm, IDS[::-1])
    found = texts(post(http, prompt="Hello", prompt_embeds=[encoded(one), encoded(other)]))
    alone = [
        *texts(post(http, prompt="", prompt_embeds=encoded(one))),
        *texts(post(http, prompt=[], prompt_embeds=encoded(other))),
        *texts(post(http, prompt="Hello")),
    ]
    assert found == alone


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_embeds": "%%%"}, "prompt_embeds"),
        ({"prompt_embeds": "YWJj"}, "prompt_embeds"),
        ({"prompt_embeds": ""}, "prompt_embeds"),
        ({"prompt_embeds": encoded([1, 2])}, "prompt_embeds"),
        ({"prompt_embeds": encoded(torch.zeros(3, 7))}, "prompt_embeds"),
        ({"prompt_embeds": None}, "prompt"),
        ({"prompt_embeds": []}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_what_are_no_embeddings_is_refused(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    response = post(http, **more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert texts(post(http, prompt=IDS))


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 3}]
)
def test_what_needs_the_tokens_of_a_prompt_is_refused(
    http: httpx.Client, llm: LLM, more: dict[str, Any]
) -> None:
    response = post(http, prompt_embeds=encoded(rows(llm)), **more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in more


def test_a_prompt_that_does_not_fit_beside_max_tokens_leaves_nothing(
    http: httpx.Client, llm: LLM
) -> None:
    response = post(http, prompt_embeds=encoded(rows(llm)), max_tokens=100_000)
    assert response.status_code == 400


def test_chats_take_none(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "prompt_embeds": encoded(rows(llm))}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def test_they_are_off_unless_asked_for(front: ModelFront) -> None:
    with (
        LLM(quiet=True, num_kv_blocks=64, max_model_len=64) as engine,
        running_server(front, client=RealClient(engine)) as server,
        waiting.PatientClient(base_url=server.url) as client,
    ):
        response = post(client, prompt_embeds=encoded(torch.zeros(3, 7)))
        assert response.status_code == 400
        assert "--enable-prompt-embeds" in response.json()["error"]["message"]
