"""Adapters as names of models: requests, lists, loading and unloading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.bundled import bundled_model_path
from quire.engine.model_front import ModelFront
from quire.errors import ConfigError
from quire.server.generation.adapters import ServedAdapters
from tests import waiting
from tests.lora.adapters import write_adapter
from tests.server.in_memory import RealClient
from tests.server.running import RunningServer, running_server

MODULES = ("q_proj", "v_proj", "down_proj")
PROMPT = list(range(5, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the bundled model, and one of another model."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("red", "blue")):
        write_adapter(root / name, bundled_model_path(), MODULES, seed=seed, strength=0.2)
    other = write_adapter(root / "other", bundled_model_path(), ("embed_tokens",))
    assert other.is_dir()
    return root


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        quiet=True, dtype="float32", num_kv_blocks=64, block_size=16, max_model_len=256,
        enable_lora=True, max_loras=2,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture
def served(front: ModelFront, llm: LLM, folder: Path) -> Iterator[RunningServer]:
    adapters = ServedAdapters({"pinned": str(folder / "red")}, folder, 16, ["bundled"])
    with running_server(front, client=RealClient(llm), adapters=adapters) as found:
        yield found


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with waiting.PatientClient(base_url=served.url) as client:
        yield client


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "prompt": PROMPT, **body}
    return http.post("/v1/completions", json=body)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def expected(llm: LLM, path: Path) -> str:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    lora = LoRARequest("expected", 1, str(path))
    return llm.generate(PROMPT, params, use_tqdm=False, lora_request=lora)[0].outputs[0].text


def test_a_request_names_an_adapter(http: httpx.Client, llm: LLM, folder: Path) -> None:
    plain = text(post(http))
    for name, path in (("pinned", "red"), ("red", "red"), ("blue", "blue")):
        response = post(http, model=name)
        assert text(response) == expected(llm, folder / path) != plain
        assert response.json()["model"] == name
    assert text(post(http)) == plain


def test_models_are_listed_with_their_parent(http: httpx.Client, folder: Path) -> None:
    cards = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    bases = {name for name, card in cards.items() if card["parent"] is None}
    assert cards.keys() == {*bases, "pinned", "red", "blue", "other"}
    assert cards["blue"]["parent"] in bases
    assert cards["blue"]["root"] == str(folder / "blue")
    assert http.get("/v1/models/blue").json()["id"] == "blue"
    assert http.get("/v1/models/green").status_code == 404


def test_an_adapter_that_does_not_fit_is_a_400(http: httpx.Client) -> None:
    response = post(http, model="other")
    assert response.status_code == 400, response.text
    assert "cannot change" in response.json()["error"]["message"]
    assert post(http).status_code == 200


def test_loading_and_unloading(http: httpx.Client, llm: LLM, folder: Path) -> None:
    assert post(http, model="late").status_code == 404
    load = {"lora_name": "late", "lora_path": "blue"}
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert text(post(http, model="late")) == expected(llm, folder / "blue")
    taken = http.post("/v1/load_lora_adapter", json=load)
    assert taken.status_code == 400 and "taken" in taken.json()["error"]["message"]
    in_place = {**load, "lora_path": "red", "load_inplace": True}
    assert http.post("/v1/load_lora_adapter", json=in_place).status_code == 200
    assert text(post(http, model="late")) == expected(llm, folder / "red")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    assert post(http, model="late").status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404


@pytest.mark.parametrize("path", ["/etc", "..", "../adapters", "nothing"])
def test_paths_outside_of_the_folder_are_refused(http: httpx.Client, path: str) -> None:
    body = {"lora_name": "bad", "lora_path": path}
    response = http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "lora_path"


def test_names_of_the_model_are_not_for_adapters(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the model's own name"):
        ServedAdapters({"bundled": str(folder / "red")}, None, 16, ["bundled"])


def test_a_server_without_lora(front: ModelFront, llm: LLM) -> None:
    with (
        running_server(front, client=RealClient(llm)) as found,
        waiting.PatientClient(base_url=found.url) as client,
    ):
        response = client.post("/v1/load_lora_adapter", json={"lora_name": "a"})
        assert response.status_code == 400
        assert "--enable-lora" in response.json()["error"]["message"]
