"""Weights of a running server, updated by clients that speak the published wires of vLLM's weight
transfer (0.33) and of TRL's client (1.16)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.bundled import bundled_model_path
from quire.engine.model_front import ModelFront
from quire.protocol.control import AdminOp, LoadWeights, Report
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import RealClient
from tests.server.running import RunningServer, running_server

KEY = "k" * 16
SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 48, "quiet": True}
PROMPTS = [[5, 17, 301, 42, 8, 11, 19, 23], [9, 8, 7, 6, 5]]
ROUTES = (
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
)
NORM = "model.norm.weight"


class Trainer:
    """The requests of TRL's client and of vLLM's `HTTPVLLMWeightSyncClient`; tensors go in the
    body, in place of its broadcast."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._model = http.get("/v1/models").json()["data"][0]["id"]

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        reply = self._http.post(path, json=body) if body is not None else self._http.post(path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def generate(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Return token ids and log-probabilities, as TRL reads them."""
        body = {
            "model": self._model,
            "prompt": prompts,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 1,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 12,
            "logprobs": 0,
            "seed": 3,
            "ignore_eos": True,
        }
        choices = self.post("/v1/completions", body)["choices"]
        for choice in choices:
            named = [int(t.removeprefix("token_id:")) for t in choice["logprobs"]["tokens"]]
            assert named == choice["token_ids"]
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]

    def send(self, tensors: Mapping[str, torch.Tensor]) -> httpx.Response:
        return self._http.post("/update_weights", json={"update_info": as_info(tensors)})

    def update(self, tensors: Mapping[str, torch.Tensor], version: str | None = None) -> str:
        """Send tensors one by one, as TRL's `update_named_param` does within `weight_update`."""
        self.post("/start_weight_update", {})
        for name, tensor in tensors.items():
            reply = self.send({name: tensor})
            assert reply.status_code == 200, reply.text
        body: dict[str, Any] = {} if version is None else {"weight_version": version}
        return self.post("/finish_weight_update", body)["weight_version"]


def as_info(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    numbers = [each.contiguous().view(-1).view(torch.uint8).numpy() for each in tensors.values()]
    return {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
        "tensors": [base64.b64encode(each.tobytes()).decode() for each in numbers],
    }


def stored() -> dict[str, torch.Tensor]:
    return load_file(bundled_model_path() / "model.safetensors")


def trained(step: int) -> dict[str, torch.Tensor]:
    """Some weights after a step, as an optimizer might leave them."""
    noise = torch.Generator().manual_seed(step)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored().items():
        if "layers.0." in name and ("mlp" in name or "norm" in name):
            change = 0.02 * torch.randn(tensor.shape, generator=noise)
            found[name] = (tensor.float() + change).to(tensor.dtype)
    return found


def answers_of(folder: Path, tensors: Mapping[str, torch.Tensor], front: ModelFront) -> Any:
    """The answers of a server of a checkpoint with these tensors."""
    folder.mkdir()
    for file in bundled_model_path().iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({**stored(), **tensors}, folder / "model.safetensors")
    with (
        LLM(model=str(folder), **SETTINGS) as llm,
        running_server(front, client=RealClient(llm, 256)) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        return Trainer(http).generate(PROMPTS)


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


class Gated(RealClient):
    """An engine that loads weights while its gate is open. is_asked: it waits for that."""

    is_open = True
    is_asked = False

    async def control(self, op: AdminOp) -> Report:
        while isinstance(op, LoadWeights) and not op.is_trial and not self.is_open:
            self.is_asked = True
            await asyncio.sleep(0.01)
        return await super().control(op)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    with LLM(**SETTINGS) as llm:
        yield Gated(llm, 256, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def updated(front: ModelFront, weights_folder: Path, gated: Gated) -> Iterator[RunningServer]:
    settings = ServerSettings(
        enable_engine_control=True,
        api_key=(KEY,),
        disable_access_log=True,
        weights_folder=str(weights_folder),
    )
    with running_server(front, settings, gated) as server:
        yield server


@pytest.fixture
def http(updated: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with waiting.PatientClient(base_url=updated.url, headers=headers) as client:
        yield client
        client.post("/resume")
    updated.wait_until_idle()


@pytest.mark.parametrize("path", ROUTES)
def test_they_are_closed_without_the_switch_and_without_a_key(
    server: RunningServer, updated: RunningServer, path: str
) -> None:
    closed = waiting.post(server.url + path, json={})
    assert closed.status_code == 404 and "--enable-engine-control" in closed.text
    assert waiting.post(updated.url + path, json={}).status_code == 401
    for name in ("/get_world_size", "/weight_info", "/server_info"):
        assert waiting.get(updated.url + name).status_code == 401


def test_a_trainer_updates_the_model_and_reads_its_new_answers(
    http: httpx.Client, front: ModelFront, tmp_path: Path
) -> None:
    """The loop of TRL's trainer: ask, train, send, forget prefixes, ask. Turns red when a tensor
    stays, a cached prefix of the old model is read, or numbers change on the way."""
    trainer = Trainer(http)
    assert http.get("/health/").status_code == 200
    info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["weight_transfer_config"] == {"backend": "file"}
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert http.get("/get_world_size/").json() == {"world_size": 1}
    trainer.post("/init_weight_transfer_engine", {"init_info": {"backend": "file"}})
    answers = [trainer.generate(PROMPTS)]
    for step in (1, 2):
        wanted = answers_of(tmp_path / f"step{step}", trained(step), front)
        trainer.post("/pause?mode=keep")
        version = trainer.update(trained(step), f"step-{step}")
        trainer.post("/resume")
        assert trainer.post("/reset_prefix_cache/") == {"success": True}
        assert version == http.get("/weight_info").json()["weight_version"] == f"step-{step}"
        answers.append(trainer.generate(PROMPTS))
        assert answers[-1] == wanted
    assert answers[0] != answers[1] != answers[2]
    trainer.post("/shutdown_weight_transfer_engine")


def test_files_of_a_folder_are_an_update_too(http: httpx.Client, weights_folder: Path) -> None:
    """In the form of `save_pretrained`. Later writes of the trainer change nothing."""
    trainer = Trainer(http)
    trainer.update(trained(3))
    wanted = trainer.generate(PROMPTS)
    trainer.update(trained(4))
    assert trainer.generate(PROMPTS) != wanted
    folder = weights_folder / "step3"
    folder.mkdir()
    names = sorted(trained(3))
    for part, some in enumerate((names[:3], names[3:])):
        save_file({name: trained(3)[name] for name in some}, folder / f"part-{part}.safetensors")
    for path in ("step3", "step3/part-0.safetensors"):
        trainer.post("/start_weight_update")
        trainer.post("/update_weights", {"update_info": {"path": path}})
        (folder / "part-0.safetensors").touch()
        trainer.post("/finish_weight_update")  # without a body, as vLLM's client
        assert trainer.generate(PROMPTS) == wanted
    trainer.post("/start_weight_update")
    linked = weights_folder / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(bundled_model_path() / "model.safetensors")
    refused = http.post("/update_weights", json={"update_info": {"path": "linked"}})
    assert refused.status_code == 400 and "is outside" in refused.text, refused.text
    for path, words in (("../x", "is outside"), ("nothing", "nothing"), ("/etc", "is outside")):
        reply = http.post("/update_weights", json={"update_info": {"path": path}})
        assert reply.status_code == 400 and words in reply.text, reply.text


def test_a_half_finished_update_changes_nothing(http: httpx.Client) -> None:
    trainer = Trainer(http)
    version = trainer.update(trained(5))
    before = trainer.generate(PROMPTS)
    trainer.post("/start_weight_update", {})
    assert trainer.send(trained(6)).status_code == 200
    assert trainer.generate(PROMPTS) == before  # the trainer dies here; the next one starts anew
    trainer.post("/start_weight_update", {})
    empty = http.post("/finish_weight_update", json={})
    assert empty.status_code == 400 and "has no tensors" in empty.text
    trainer.post("/shutdown_weight_transfer_engine")
    nothing = {"update_info": as_info({})}
    for path, body in (("/update_weights", nothing), ("/finish_weight_update", {})):
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "/start_weight_update first" in reply.text
    assert trainer.generate(PROMPTS) == before
    assert http.get("/weight_info").json() == {"weight_version": version}


WRONG: list[tuple[str, Any, str]] = [
    ("name", {"model.nothing": torch.zeros(3)}, "no tensor 'model.nothing'"),
    ("shape", {NORM: torch.zeros(3)}, f"'{NORM}' has shape [3]"),
    ("dtype", {NORM: torch.zeros(3, dtype=torch.int64)}, f"'{NORM}' has dtype 'int64'"),
    ("numbers", {NORM: torch.full_like(stored()[NORM], torch.nan)}, f"'{NORM}' holds"),
]


@pytest.mark.parametrize(("what", "tensors", "words"), WRONG, ids=[each[0] for each in WRONG])
def test_wrong_tensors_are_refused_by_name(
    http: httpx.Client, what: str, tensors: Any, words: str
) -> None:
    """Tensors that were sent before them are not lost."""
    trainer = Trainer(http)
    trainer.update(trained(7))
    wanted = trainer.generate(PROMPTS)
    trainer.update(trained(8))
    trainer.post("/start_weight_update", {})
    assert trainer.send(trained(7)).status_code == 200
    reply = trainer.send(tensors)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert trainer.generate(PROMPTS) != wanted
    trainer.post("/finish_weight_update", {})
    assert trainer.generate(PROMPTS) == wanted


def test_bodies_that_contradict_themselves_are_refused(http: httpx.Client) -> None:
    trainer = Trainer(http)
    trainer.post("/start_weight_update", {})
    good = as_info({NORM: stored()[NORM]})
    for change, words in (
        ({"names": [NORM, "x"]}, "2 names"),
        ({"tensors": ["AAAA"]}, "has 3 bytes, but shape"),
        ({"shapes": [[-1]]}, "Send all of its numbers"),
        ({"dtype_names": ["int8"]}, "has dtype 'int8'"),
        ({"tensors": ["*"]}, "update_info.tensors"),
        ({"path": "step3"}, "tensors and a path"),
        ({"colour": "x"}, "colour"),
    ):
        reply = http.post("/update_weights", json={"update_info": {**good, **change}})
        assert reply.status_code == 400 and words in reply.text, reply.text
    label = http.post("/finish_weight_update", json={"weight_version": "a\nb"})
    assert label.status_code == 400 and "weight_version" in label.text
    size = http.get("/get_world_size?include_dp=maybe")
    assert size.status_code == 400 and "include_dp" in size.text


def test_transports_between_gpus_are_refused_by_name(http: httpx.Client) -> None:
    """With what to send instead, and a status that TRL's client does not try again."""
    trainer = Trainer(http)
    trainer.post("/start_weight_update", {})
    nccl = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2}
    announced = {"names": [NORM], "dtype_names": ["float32"], "shapes": [[9]]}
    for path, body, word in (
        ("/init_weight_transfer_engine", {"init_info": {**nccl, "packed": True}}, "NCCL"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "'nccl'"),
        ("/update_weights", {"update_info": {**announced, "packed": True}}, "NCCL"),
        ("/update_weights", {"update_info": {**announced, "ipc_handles_pickled": "x"}}, "NCCL"),
        ("/update_weights", {"update_info": announced}, "NCCL"),
        ("/collective_rpc", {"method": "update_weights"}, "collective_rpc"),
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2}, "NCCL"),
        ("/update_named_param/", {"name": NORM, "dtype": "float32", "shape": [9]}, "NCCL"),
        ("/batch_update_named_params/", {"params": []}, "NCCL"),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 501 and word in reply.text, (path, reply.text)
        assert "base64" in reply.text
    unknown = http.post("/init_weight_transfer_engine", json={"init_info": {"colour": 1}})
    assert unknown.status_code == 400 and "colour" in unknown.text


def test_the_server_that_trl_had_up_to_1_12(http: httpx.Client) -> None:
    """Its requests, and what its client reads of the answers. Turns red when a row belongs to
    another prompt, or ids and log-probabilities are not in one order."""
    trainer = Trainer(http)
    fixed: dict[str, Any] = {
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 12,
        "structured_outputs_regex": None,
        "generation_kwargs": {"seed": 3, "ignore_eos": True},
    }
    plain = trainer.generate(PROMPTS)
    body = {"prompts": PROMPTS, "images": None, "n": 1, "logprobs": 0, **fixed}
    found = trainer.post("/generate/", body)
    assert found["prompt_ids"] == PROMPTS
    assert found["completion_ids"] == [ids for ids, _ in plain]
    assert [[each[0] for each in row] for row in found["logprobs"]] == [lps for _, lps in plain]
    assert [[i for (i,) in row] for row in found["logprob_token_ids"]] == found["completion_ids"]
    two = trainer.post("/generate/", {**body, "n": 2, "logprobs": 3})
    assert len(two["completion_ids"]) == 4 and len(two["prompt_ids"]) == 2
    for ids, logprobs, sampled in zip(
        two["logprob_token_ids"], two["logprobs"], two["completion_ids"], strict=True
    ):
        for some, values, token in zip(ids, logprobs, sampled, strict=True):
            assert len(some) == len(values) in (3, 4) and token in some
            assert values == sorted(values, reverse=True)
    assert trainer.post("/generate/", {**body, "logprobs": None})["logprobs"] is None
    hi, bye = ([{"role": "user", "content": text}] for text in ("hi", "good bye"))
    chat = {"messages": [hi, bye], "n": 1, "logprobs": 0, "chat_template_kwargs": {}, "tools": None}
    talked = trainer.post("/chat/", {**chat, **fixed})
    for i, each in enumerate((hi, bye)):
        alone = {"messages": each, "max_tokens": 12, "seed": 3, "ignore_eos": True}
        alone = {**alone, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "return_token_ids": True}
        wanted = trainer.post("/v1/chat/completions", alone)
        assert talked["prompt_ids"][i] == wanted["prompt_token_ids"]
        assert talked["completion_ids"][i] == wanted["choices"][0]["token_ids"]
    assert trainer.post("/close_communicator/")["message"]
    many = {**body, "prompts": PROMPTS[:1] * 129}
    chats = {**chat, **fixed, "messages": [hi] * 129}
    for path, wrong, word in (
        ("/generate/", {**body, "images": [["AAAA"], None]}, "images"),
        ("/generate/", {**body, "generation_kwargs": {"colour": 1}}, "generation_kwargs"),
        ("/chat/", {**chat, **fixed, "messages": []}, "messages"),
        *(
            (path, {**body, "generation_kwargs": {"n": n}}, word)
            for path, body in (("/generate/", many), ("/chat/", chats))
            for n, word in ((17, "max_n"), (2, "max_sequences"))
        ),
    ):
        reply = http.post(path, json=wrong)
        assert reply.status_code == 400 and word in reply.text, reply.text


def test_a_sleeping_engine_takes_no_weights(http: httpx.Client) -> None:
    trainer = Trainer(http)
    before = trainer.generate(PROMPTS)
    trainer.post("/sleep")
    trainer.post("/start_weight_update", {})
    asleep = trainer.send(trained(9))
    trainer.post("/wake_up")
    assert asleep.status_code == 400 and "sleeps" in asleep.text
    assert trainer.generate(PROMPTS) == before


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_outlives_a_sleep(http: httpx.Client, level: int) -> None:
    """Fault: a finish that a sleeping engine refused dropped all that had been sent."""
    trainer = Trainer(http)
    trainer.update(trained(14))
    wanted = trainer.generate(PROMPTS)
    version = trainer.update(trained(15))
    trainer.post("/start_weight_update", {})
    assert trainer.send(trained(14)).status_code == 200
    trainer.post(f"/sleep?level={level}")
    for _ in range(2):
        asleep = http.post("/finish_weight_update", json={})
        assert asleep.status_code == 503, asleep.text
        assert "/wake_up, then /finish_weight_update again" in asleep.text
        assert http.get("/weight_info").json() == {"weight_version": version}
    trainer.post("/wake_up")
    trainer.post("/finish_weight_update", {})
    assert trainer.generate(PROMPTS) == wanted


def test_one_of_two_trainers_wins(http: httpx.Client, gated: Gated) -> None:
    """Turns red when calls at the same moment mix two updates, or remove files that are read."""
    trainer = Trainer(http)
    trainer.update(trained(16))
    wanted = trainer.generate(PROMPTS)
    trainer.update(trained(17))
    trainer.post("/start_weight_update", {})
    assert trainer.send(trained(16)).status_code == 200
    gated.is_open = False
    with ThreadPoolExecutor(1) as thread:
        try:
            first = thread.submit(http.post, "/finish_weight_update", json={})
            waiting.wait_for(lambda: gated.is_asked or first.done(), "the first finish")
            info = {"update_info": as_info(trained(17))}
            for path, body in (
                ("/finish_weight_update", {}),
                ("/start_weight_update", {}),
                ("/update_weights", info),
                ("/shutdown_weight_transfer_engine", {}),
            ):
                reply = http.post(path, json=body)
                assert reply.status_code == 409, (path, reply.text)
                assert "then POST /start_weight_update" in reply.text
        finally:
            gated.is_open = True
        assert first.result().status_code == 200, first.result().text
    assert trainer.generate(PROMPTS) == wanted
    late = http.post("/finish_weight_update", json={})
    assert late.status_code == 400 and "/start_weight_update first" in late.text
    trainer.update(trained(17))
    assert trainer.generate(PROMPTS) != wanted


def versions_of(reply: Any) -> list[str]:
    return [span["version"] for span in reply["choices"][0]["weight_versions"]]


def test_answers_say_which_weights_made_them(http: httpx.Client) -> None:
    """On each route that continues tokens, whole and streamed, if asked; and for an answer that an
    update cuts in two, with the tokens of each."""
    trainer = Trainer(http)
    trainer.update(trained(10), "ten")
    plain = {"prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    asked = {"return_weight_versions": True}
    tokens = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 4, **asked}}
    assert "weight_versions" not in trainer.post("/v1/completions", plain)["choices"][0]
    for path, body in (
        ("/v1/completions", {**plain, **asked}),
        ("/v1/chat/completions", {**chat, **asked}),
        ("/inference/v1/generate", tokens),
    ):
        assert versions_of(trainer.post(path, body)) == ["ten"], path
        last = streamed(http, path, {**body, "stream": True})[-1]
        assert versions_of(last) == ["ten"], path
    long = {**plain, "max_tokens": 200, "stream": True, "return_token_ids": True, **asked}
    chunks: list[Any] = []
    with http.stream("POST", "/v1/completions", json=long) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunks.append(json.loads(line[6:]))
            if len(chunks) == 1:
                trainer.post("/pause?mode=keep")
                trainer.update(trained(11), "eleven")
                trainer.post("/resume")
    first, second = chunks[-1]["choices"][0]["weight_versions"]
    assert (first["version"], second["version"]) == ("ten", "eleven")
    assert first["start"] == 0 < first["end"] == second["start"] < second["end"] == 200
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    going = [*PROMPTS[0], *ids[: first["end"]]]
    rest = trainer.post("/v1/completions", {**plain, "prompt": going, "return_token_ids": True})
    assert rest["choices"][0]["token_ids"] == ids[first["end"] :][:4]


def streamed(http: httpx.Client, path: str, body: Any) -> list[Any]:
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    found = [json.loads(line[6:]) for line in lines]
    return [each for each in found if each["choices"]]


def test_receipts_tell_models_apart(http: httpx.Client) -> None:
    trainer = Trainer(http)
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "deterministic": True, "temperature": 0}
    found: list[Any] = []
    for step in (12, 13, 12):
        trainer.update(trained(step), f"v{step}")
        answer_id = trainer.post("/v1/completions", body)["id"]
        found += http.get(f"/receipts/{answer_id}").json()["data"]
    digests = [each["statement"]["model"]["weights"] for each in found]
    assert digests[0] == digests[2] != digests[1]
    assert found[0]["id"] == found[2]["id"]
    assert [each["evidence"]["weights_version"] for each in found] == ["v12", "v13", "v12"]


def test_an_engine_without_a_folder_takes_no_weights(front: ModelFront) -> None:
    settings = ServerSettings(enable_engine_control=True, disable_access_log=True)
    with (
        running_server(front, settings) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        reply = http.post("/start_weight_update")
        assert reply.status_code == 501 and "quire serve" in reply.text
