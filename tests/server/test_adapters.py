"""Adapters as names of models: requests, lists, loading and unloading."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.engine.model_front import ModelFront
from quire.protocol.beam_search import BeamSearchParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.generation import served_model
from quire.server.generation.adapters import ServedAdapters
from quire.server.requests.errors import RefusedError
from quire.server.settings import ServerSettings
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


def test_a_link_out_of_the_folder_is_no_adapter(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the load route refused it, and requests that named it were served."""
    inside = tmp_path / "inside"
    shutil.copytree(folder / "red", inside / "red")
    (inside / "alias").symlink_to("red")
    (inside / "out").symlink_to(folder / "blue")
    linked = tmp_path / "linked"
    linked.symlink_to(inside)  # the folder itself may be a link
    for root in (inside, linked):
        served = ServedAdapters({}, root, 16, ["bundled"])
        assert served.names == ["alias", "red"]
        assert [served.has(name) for name in ("red", "alias", "out")] == [True, True, False]
    assert "'out'" in caplog.text


@pytest.mark.parametrize("name", ["a" * 129, "a\nb", "\u202eevil", "", "caf\u00e9"])
def test_names_are_bounded(http: httpx.Client, folder: Path, name: str) -> None:
    load = {"lora_name": name, "lora_path": "blue"}
    reply = http.post("/v1/load_lora_adapter", json=load)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "lora_name"
    with pytest.raises(ConfigError, match="128"):
        ServedAdapters({name: str(folder / "red")}, None, 16, ["bundled"])


def test_the_number_of_names_is_bounded(tmp_path: Path, folder: Path) -> None:
    """Fault: 1,500 names of 3 kB made /v1/models 4.8 MB."""
    for name in ("one", "three", "two", "x" * 200):
        shutil.copytree(folder / "red", tmp_path / name)

    async def work() -> None:
        served = ServedAdapters({}, tmp_path, 16, ["bundled"], max_names=2)
        assert served.names == ["one", "three"]
        assert served.has("two") and not served.has("x" * 200)
        for name in ("late", "later"):
            await served.load(name, "two", replace=False)
        with pytest.raises(RefusedError, match=r"2 .*max_adapters"):
            await served.load("latest", "two", replace=False)
        await served.load("later", "one", replace=True)
        served.unload("late")
        await served.load("latest", "two", replace=False)
        assert served.names == ["later", "latest"]

    asyncio.run(work())


def test_a_name_is_given_once(folder: Path) -> None:
    """Fault: the last one replaced the others."""
    modules = tuple(f"a={folder / name}" for name in ("red", "blue"))
    server = ServerSettings(lora_modules=modules)
    with pytest.raises(ConfigError, match=r"'a' to .*red' and .*blue'"):
        served_model._adapters(EngineSettings(enable_lora=True), server, ("bundled",))


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


def test_a_folder_is_loaded_under_its_own_name(http: httpx.Client, llm: LLM, folder: Path) -> None:
    for body in ({"lora_name": "blue"}, {"lora_name": "blue", "lora_path": "blue"}):
        assert http.post("/v1/load_lora_adapter", json=body).status_code in (200, 400)
        assert text(post(http, model="blue")) == expected(llm, folder / "blue")
        http.post("/v1/unload_lora_adapter", json={"lora_name": "blue"})
    elsewhere = {"lora_name": "blue", "lora_path": "red"}
    assert http.post("/v1/load_lora_adapter", json=elsewhere).status_code == 400


@pytest.mark.parametrize("name", ["a" * 300, "nul\0", "../red", "."])
def test_names_that_no_folder_can_have(http: httpx.Client, name: str) -> None:
    assert post(http, model=name).status_code in (400, 404)
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": name})
    assert loaded.status_code == 400, loaded.text


def test_prefixes_are_pinned_for_the_base_model_alone(http: httpx.Client) -> None:
    response = http.post("/admin/prefixes", json={"model": "blue", "prompt": PROMPT})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


CHAT = [{"role": "user", "content": "hi"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8},
}


def words(body: dict[str, Any]) -> str:
    """The text of an answer of any of the APIs."""
    if "choices" in body:
        (choice,) = body["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    parts = body["content"] if "content" in body else body["output"][-1]["content"]
    return parts[0]["text"]


@pytest.mark.parametrize("path", APIS)
def test_every_api_takes_adapters(http: httpx.Client, path: str) -> None:
    """Each is computed with the adapter that is named, and says so; the seed is the same."""
    found: dict[str, str] = {}
    for name in ("bundled", "red", "blue"):
        body = {"model": name, "temperature": 0, **APIS[path]}
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == name
        found[name] = words(reply.json())
        assert words(http.post(path, json=body).json()) == found[name]
    assert len(set(found.values())) == 3
    refused = http.post(path, json={"model": "green", **APIS[path]})
    assert refused.status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_of_adapters(http: httpx.Client, path: str) -> None:
    body = {"model": "red", "temperature": 0, **APIS[path]}
    whole = words(http.post(path, json=body).json())
    pieces: list[str] = []
    with http.stream("POST", path, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert chunk["model"] == "red"
                for choice in chunk["choices"]:
                    found = choice["text"] if "text" in choice else choice["delta"].get("content")
                    pieces.append(found or "")
    assert "".join(pieces) == whole


def test_beams_samples_and_grammars_of_adapters(http: httpx.Client, llm: LLM, folder: Path) -> None:
    lora = LoRARequest("red", 1, str(folder / "red"))
    beams = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    best = llm.beam_search([PROMPT], beams, use_tqdm=False, lora_request=lora)[0].sequences
    response = post(
        http, model="red", use_beam_search=True, n=2, max_tokens=6, return_token_ids=True
    )
    tokens = [choice["token_ids"] for choice in response.json()["choices"]]
    assert tokens == [each.tokens[len(PROMPT) :] for each in best]
    drawn = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    (samples,) = llm.generate(PROMPT, drawn, use_tqdm=False, lora_request=lora)
    response = post(http, model="red", temperature=1, top_p=1, n=3, seed=5, max_tokens=6)
    got = [choice["text"] for choice in response.json()["choices"]]
    assert got == [each.text for each in samples.outputs]
    choice = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
    assert text(post(http, model="red", ignore_eos=False, **choice)) in ("yes", "no")


def test_apis_that_take_no_adapters_say_so(http: httpx.Client) -> None:
    reply = http.post("/v1/embeddings", json={"model": "red", "input": "hi"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "model"
    assert "Adapters give no vectors" in reply.json()["error"]["message"]


def test_a_folder_that_is_written_later_is_found_on_first_use(
    http: httpx.Client, llm: LLM, folder: Path
) -> None:
    """Nobody loads it: the server looks where it was told. A folder that is gone is no name."""
    late = folder / "written-late"
    assert post(http, model=late.name).status_code == 404
    write_adapter(late, bundled_model_path(), MODULES, seed=21, strength=0.2)
    try:
        assert text(post(http, model=late.name)) == expected(llm, late)
        assert late.name in {each["id"] for each in http.get("/v1/models").json()["data"]}
        before = text(post(http, model=late.name))
        write_adapter(late, bundled_model_path(), MODULES, seed=22, strength=0.2)
        assert text(post(http, model=late.name)) == expected(llm, late) != before
    finally:
        shutil.rmtree(late)
    assert post(http, model=late.name).status_code == 404


def test_who_leaves_the_queue_for_a_slot_holds_up_nobody(llm: LLM, folder: Path) -> None:
    """Two slots, both in use; the third adapter's request is aborted while it waits."""
    from tests.lora.adapters import write_adapter as write

    third = write(folder.parent / "third", bundled_model_path(), MODULES, seed=9)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [LoRARequest(path.name, 1, str(path)) for path in (folder / "red", folder / "blue")]
    stream = llm.stream(PROMPT, params)
    next(stream)
    engine = llm._llm_engine
    handles: list[int] = []
    for lora in (*requests, LoRARequest("third", 2, str(third))):
        handles.append(engine.next_handle)
        prompt = engine.adapters.put(engine.engine.renderer.render_prompt(PROMPT), lora)
        engine.add(prompt, params, SchedulingParams())
    core = llm.engine.client._core  # type: ignore[attr-defined]
    for _ in range(20):
        engine.run_step()
    engine.abort(range(handles[2], handles[2] + 1))
    engine.run_step()
    assert not core._opening and not core._adapters._waiting
    stream.close()
    engine.abort(range(handles[0], handles[-1] + 1))
    while engine.has_unfinished_requests():
        engine.run_step()
