"""Encoders over HTTP: vectors, classes, scores and documents in order, as `LLM` gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire import LLM, PoolingParams
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import load_model_front
from tests import waiting
from tests.encoder_writer import TEXTS, write_encoder, write_sentence_files
from tests.server.in_memory import RealClient
from tests.server.running import MODEL, running_server


@contextmanager
def served(folder: Path) -> Iterator[tuple[httpx.Client, LLM]]:
    front = load_model_front(EngineSettings(), folder, read_model_spec(folder))
    with (
        LLM(str(folder), quiet=True, block_size=4, max_num_seqs=8) as llm,
        running_server(front, client=RealClient(llm)) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        yield http, llm


def post(http: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    reply = http.post(route, json={"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def expected(folder: Path, **given: Any) -> Any:
    """Outputs of an engine of its own: the server's belongs to the server."""
    with LLM(str(folder), quiet=True, block_size=4, max_num_seqs=8) as llm:
        return given["ask"](llm)


def test_vectors_follow_the_sentence_files(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    prompts = {"query": "the queen ", "passage": ""}
    write_sentence_files(
        tmp_path, mode="cls", normalize=False, prompts=prompts, default_prompt="query"
    )
    found = expected(tmp_path, ask=lambda llm: llm.embed(TEXTS, use_tqdm=False))
    plain = expected(
        tmp_path,
        ask=lambda llm: llm.embed(
            TEXTS,
            pooling_params=PoolingParams("mean", normalize=True),
            prompt_name="passage",
            use_tqdm=False,
        ),
    )
    with served(tmp_path) as (http, _):
        vectors = post(http, "/v1/embeddings", input=TEXTS)["data"]
        for one, other in zip(vectors, found, strict=True):
            np.testing.assert_allclose(one["embedding"], other.outputs.embedding, atol=1e-6)
        asked: dict[str, Any] = {"pooling": "mean", "normalize": True, "prompt_name": "passage"}
        vectors = post(http, "/v1/embeddings", input=TEXTS, **asked)["data"]
        for one, other in zip(vectors, plain, strict=True):
            np.testing.assert_allclose(one["embedding"], other.outputs.embedding, atol=1e-6)
        cut = post(http, "/v1/embeddings", input=TEXTS[2], truncate_prompt_tokens=6)
        assert cut["usage"]["prompt_tokens"] == 6
        for route, body, words in (
            ("/v1/embeddings", {"input": "king", "prompt_name": "odd"}, "prompt_name is 'odd'"),
            ("/classify", {"input": "king"}, "no classes"),
            ("/v1/completions", {"prompt": "king"}, "draws no tokens"),
        ):
            reply = http.post(route, json=body)
            assert reply.status_code == 400 and words in reply.text, reply.text


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_cross_encoder_scores_pairs(tmp_path: Path, kind: str) -> None:
    write_encoder(kind, tmp_path, num_labels=1)
    found = expected(tmp_path, ask=lambda llm: llm.score(TEXTS[0], TEXTS, use_tqdm=False))
    scores = [each.outputs.score for each in found]
    with served(tmp_path) as (http, _):
        given = post(http, "/score", text_1=TEXTS[0], text_2=TEXTS)
        np.testing.assert_allclose([each["score"] for each in given["data"]], scores, atol=1e-6)
        num_tokens = sum(len(each.prompt_token_ids) for each in found)
        assert given["usage"]["prompt_tokens"] == num_tokens
        ranked = post(http, "/rerank", query=TEXTS[0], documents=TEXTS)["results"]
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
        assert [each["index"] for each in ranked] == best_first
        cut = post(http, "/score", text_1=TEXTS[2], text_2=TEXTS[5], truncate_prompt_tokens=12)
        assert cut["usage"]["prompt_tokens"] == 12
        pair, ranking = {"text_1": "a", "text_2": "b"}, {"query": "a", "documents": ["b"]}
        for route, body in (("/score", pair), ("/rerank", ranking)):
            post(http, route, **body, add_special_tokens=True)
            for field, value in (("add_special_tokens", False), ("pooling", "mean")):
                reply = http.post(route, json={**body, field: value})
                assert reply.status_code == 400, "a field without an effect"
                assert reply.json()["error"]["param"] == field


def test_classes(tmp_path: Path) -> None:
    labels = {0: "calm", 1: "glad", 2: "sad"}
    write_encoder("roberta", tmp_path, num_labels=3, id2label=labels)
    found = expected(tmp_path, ask=lambda llm: llm.classify(TEXTS, use_tqdm=False))
    with served(tmp_path) as (http, llm):
        assert llm.engine.spec.classes is not None
        assert llm.engine.spec.classes.labels == ("calm", "glad", "sad")
        data = post(http, "/classify", input=TEXTS)["data"]
        for index, (one, other) in enumerate(zip(data, found, strict=True)):
            np.testing.assert_allclose(one["probs"], other.outputs.probs, atol=1e-6)
            best = int(np.argmax(one["probs"]))
            assert one["label"] == labels[best]
            assert (one["index"], one["num_classes"]) == (index, 3)
        raw = post(http, "/classify", input=TEXTS[0], use_activation=False)["data"][0]
        shifted = np.exp(np.array(raw["probs"]) - max(raw["probs"]))
        np.testing.assert_allclose(shifted / shifted.sum(), data[0]["probs"], atol=1e-5)
        bare = post(http, "/classify", input=TEXTS[0], add_special_tokens=False)
        with_them = post(http, "/classify", input=TEXTS[0])
        assert bare["usage"]["prompt_tokens"] == with_them["usage"]["prompt_tokens"] - 2
        reply = http.post("/classify", json={"input": "king", "pooling": "mean"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "pooling"
        reply = http.post("/score", json={"text_1": "king", "text_2": "sea"})
        assert reply.status_code == 400 and "3 classes" in reply.text
