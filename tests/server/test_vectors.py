"""Embeddings, pooling and scores over HTTP are the engine's, in the forms that clients read."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from quire import LLM, PoolingParams
from quire.server.openai.answer import ITEMS_PER_TURN, encoded_by_turns
from quire.server.openai.vectors import EmbeddingData
from tests import waiting
from tests.server.in_memory import RealClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.server.test_faults import connect, raw_request
from tests.waiting import WAIT_S

TEXTS = ["import os", "def add(a, b):\n    return a + b\n", "Once upon a time there was a king."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=512, max_model_len=512) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[tuple[str, bool], np.ndarray[Any, Any]]:
    """Vectors by pooling and whether they are scaled; made before the server takes the engine."""
    found: dict[tuple[str, bool], np.ndarray[Any, Any]] = {}
    for pooling in ("last", "cls", "mean"):
        for normalize in (True, False):
            outputs = llm.encode(TEXTS, PoolingParams(pooling=pooling, normalize=normalize))
            found[pooling, normalize] = np.stack([each.outputs.data.numpy() for each in outputs])
    return found


@pytest.fixture(scope="module")
def real(llm: LLM, expected: object) -> Iterator[RunningServer]:
    with running_server(bundled_front(), client=RealClient(llm)) as found:
        yield found


@pytest.fixture
def http(real: RunningServer) -> Iterator[httpx.Client]:
    with waiting.PatientClient(base_url=real.url) as client:
        yield client


def post(http: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    reply = http.post(route, json={"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_client_gets_the_vectors_of_the_engine(
    real: RunningServer, expected: dict[Any, Any]
) -> None:
    """It asks for base64 unless told otherwise, and gives floats."""
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", timeout=WAIT_S) as client:
        given: Any
        for given in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model=MODEL, input=TEXTS, **given)
            vectors = np.array([each.embedding for each in found.data])
            np.testing.assert_allclose(vectors, expected["last", True], rtol=0, atol=1e-6)
            assert [each.index for each in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0
        one = client.embeddings.create(model=MODEL, input=TEXTS[1])
        np.testing.assert_allclose(one.data[0].embedding, expected["last", True][1], atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "cls", "mean"])
def test_pooling(http: httpx.Client, expected: dict[Any, Any], pooling: str) -> None:
    for normalize in (True, False):
        asked: dict[str, Any] = {"input": TEXTS, "pooling": pooling, "normalize": normalize}
        found = post(http, "/pooling", **asked)["data"]
        vectors = np.array([each["data"] for each in found], np.float32)
        np.testing.assert_allclose(vectors, expected[pooling, normalize], rtol=1e-6, atol=1e-6)
        packed = post(http, "/pooling", **asked, encoding_format="base64")["data"]
        for one, other in zip(packed, vectors, strict=True):
            read = np.frombuffer(base64.b64decode(one["data"]), "<f4")
            np.testing.assert_array_equal(read, other)


def test_token_ids_are_their_text(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    as_text = post(http, "/v1/embeddings", input=TEXTS[0])["data"]
    assert post(http, "/v1/embeddings", input=tokens)["data"] == as_text
    assert post(http, "/v1/embeddings", input=[tokens])["data"] == as_text


def test_fewer_dimensions(http: httpx.Client, expected: dict[Any, Any]) -> None:
    (found,) = post(http, "/v1/embeddings", input=TEXTS[0], dimensions=16)["data"]
    cut = expected["last", True][0][:16]
    np.testing.assert_allclose(found["embedding"], cut / np.linalg.norm(cut), atol=1e-6)
    width = len(expected["last", True][0])
    (whole,) = post(http, "/v1/embeddings", input=TEXTS[0], dimensions=width)["data"]
    np.testing.assert_allclose(whole["embedding"], expected["last", True][0], atol=1e-6)


def test_long_texts_are_cut_if_asked(http: httpx.Client) -> None:
    long = "word " * 700
    reply = http.post("/v1/embeddings", json={"input": long})
    assert reply.status_code == 400 and "maximum context length" in reply.text
    found = post(http, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == 512
    assert post(http, "/v1/embeddings", input=long, truncate_prompt_tokens=5)["usage"] == {
        "prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
def test_scores_are_cosines(http: httpx.Client, expected: dict[Any, Any], route: str) -> None:
    vectors = expected["last", True].astype(np.float64)
    found = post(http, route, text_1=TEXTS[0], text_2=TEXTS)["data"]
    scores = [each["score"] for each in found]
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-6)
    pairs = post(http, route, text_1=TEXTS, text_2=TEXTS[::-1])["data"]
    np.testing.assert_allclose(
        [each["score"] for each in pairs], (vectors * vectors[::-1]).sum(1), atol=1e-6
    )


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered(http: httpx.Client, route: str) -> None:
    documents: list[Any] = [TEXTS[2], {"text": TEXTS[0]}, TEXTS[1]]
    found = post(http, route, query=TEXTS[0], documents=documents)["results"]
    scores = [each["relevance_score"] for each in found]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert found[0]["index"] == 1 and found[0]["document"] == {"text": TEXTS[0]}
    best = post(http, route, query=TEXTS[0], documents=documents, top_n=1, return_documents=False)
    assert [set(each) for each in best["results"]] == [{"index", "relevance_score"}]


def test_documents_are_cut(http: httpx.Client) -> None:
    """Turns red when max_tokens_per_doc has no effect, cuts the query too, or changes what is
    shown."""
    text, given = TEXTS[2], {"query": TEXTS[2], "return_documents": False}
    asked = {"prompt": text, "add_special_tokens": False}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    start = http.post("/detokenize", json={"tokens": tokens[:3]}).json()["prompt"]
    assert len(tokens) > 3 and text.startswith(start)
    cut = post(http, "/v2/rerank", **given, documents=[text], max_tokens_per_doc=3)
    assert cut["results"] == post(http, "/v2/rerank", **given, documents=[start])["results"]
    shown = post(http, "/rerank", query="a", documents=["Ä" * 9, text], max_tokens_per_doc=1)
    assert {each["document"]["text"] for each in shown["results"]} == {"Ä" * 9, text}
    whole = post(http, "/rerank", **given, documents=[text], max_tokens_per_doc=len(tokens))
    assert whole["results"] == post(http, "/rerank", **given, documents=[text])["results"]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/v1/embeddings", {"input": []}, "is an empty list"),
        ("/v1/embeddings", {"input": ["a", 5]}, "mixes token ids"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "has no tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions is 0"),
        ("/v1/embeddings", {"input": "a", "dimensions": 100_000}, "dimensions is 100000"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "odd"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "pooling": "odd"}, "pooling"),
        ("/v1/embeddings", {"input": "a", "odd": 1}, "There is no field 'odd'"),
        ("/v1/embeddings", {"input": "a", "request_id": "é"}, "request_id"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -5}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": ["a"] * 3000}, "max_embedding_inputs"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "make no pairs|2 texts"),
        ("/rerank", {"query": "a", "documents": []}, "documents has 0"),
        ("/rerank", {"query": "a", "documents": [{"title": "x"}]}, "documents[0].text is missing"),
        ("/rerank", {"query": "a", "documents": ["x"], "top_n": 0}, "top_n is 0"),
        (
            "/rerank",
            {"query": "a", "documents": ["x"], "max_tokens_per_doc": 0},
            "max_tokens_per_doc is 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests(http: httpx.Client, route: str, body: dict[str, Any], words: str) -> None:
    reply = http.post(route, json=body)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert any(each in message for each in words.split("|")), message


def test_large_answers_are_written_by_turns() -> None:
    """Fault: other streams stand still while 2,048 vectors become JSON."""
    rows = [EmbeddingData(i, [i + 0.5] * 3) for i in range(100)]

    async def work() -> tuple[list[EmbeddingData], int]:
        writing = asyncio.create_task(encoded_by_turns(rows))
        num_turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            num_turns += 1
        return writing.result(), num_turns

    found, num_turns = asyncio.run(work())
    assert num_turns >= 100 // ITEMS_PER_TURN
    assert msgspec.json.decode(msgspec.json.encode(found)) == msgspec.to_builtins(rows)


def test_many_texts_do_not_fill_the_queue(http: httpx.Client) -> None:
    found = post(http, "/v1/embeddings", input=[f"text {number}" for number in range(400)])
    assert len(found["data"]) == 400
    reply = http.get("/metrics").text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop"' in reply


def test_timelines_and_unknown_models(http: httpx.Client) -> None:
    post(http, "/v1/embeddings", input=TEXTS, request_id="vectors-1")
    timeline = http.get("/admin/requests/vectors-1").json()
    assert timeline["num_prompt_tokens"] > 0 and timeline["finish_reason"] == "stop"
    reply = http.post("/v1/embeddings", json={"input": "a", "model": "absent"})
    assert reply.status_code == 404


def test_nothing_is_left_of_a_client_that_leaves(server: RunningServer) -> None:
    server.call(lambda: setattr(server.client, "paused", True))
    with connect(server) as connection:
        connection.sendall(raw_request({"input": TEXTS}, "/v1/embeddings"))
        server.wait_until_open(len(TEXTS))
    server.call(lambda: setattr(server.client, "paused", False))
    server.wait_until_idle()
