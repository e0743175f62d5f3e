"""Receipts over HTTP: each API, streamed or not, per key, signed; and from a server under load
whose core is killed, which `quire replay` makes again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config.checkpoint import read_checkpoint
from quire.config.kv_disk.digest import stamp_files
from quire.engine.model_front import ModelFront
from quire.entrypoints.cli.main import main
from quire.protocol.receipts import Receipt, read_receipts
from quire.protocol.status import EngineFacts
from quire.server.generation.receipts import ReceiptStore
from quire.server.readings.timeline import Timeline
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests import waiting
from tests.engine.test_laws import has_kernels
from tests.protocol.test_receipts import receipt_of
from tests.server.in_memory import InMemoryClient
from tests.server.running import RunningServer, held_up, running_server
from tests.server.test_run import children, serving_by_command
from tests.waiting import wait_for

KEY = b"a key of at least sixteen bytes"
KEYS = ("key-of-the-first-caller", "key-of-the-second-caller")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [50, 60, 70], "max_tokens": 6},
    "/v1/chat/completions": {**CHAT, "max_tokens": 6},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {**CHAT, "model": "bundled", "max_tokens": 6},
}
STREAMED_ID = {"/v1/responses": ("response", "id"), "/v1/messages": ("message", "id")}


def key_file(folder: Path, mode: int = 0o600, key: bytes = KEY) -> Path:
    path = folder / "receipt.key"
    path.write_bytes(key + b"\n")
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def server(front: ModelFront, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("key")
    files = read_checkpoint(bundled_model_path()).files
    facts = EngineFacts({"quire": "test"}, "config", stamp_files(files), unstable="")
    settings = ServerSettings(
        disable_access_log=True, api_key=KEYS, receipt_key=str(key_file(folder))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with running_server(front, settings, InMemoryClient(facts=facts)) as found:
            yield found


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with waiting.PatientClient(base_url=server.url, headers=headers) as client:
        yield client
    server.wait_until_idle()


def receipts(http: httpx.Client, name: str) -> list[Receipt]:
    reply = http.get(f"/receipts/{name}")
    assert reply.status_code == 200, reply.text
    return read_receipts(reply.content)


def ask(http: httpx.Client, path: str, **more: Any) -> dict[str, Any]:
    body = {**BODIES[path], "deterministic": True, "seed": 3, "ignore_eos": True, **more}
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed_id(http: httpx.Client, path: str) -> str:
    """The id that a stream says."""
    body = {**BODIES[path], "deterministic": True, "seed": 3, "ignore_eos": True, "stream": True}
    found: list[str] = []
    with http.stream("POST", path, json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                value: Any = json.loads(line.removeprefix("data: "))
                for name in STREAMED_ID.get(path, ("id",)):
                    value = value.get(name, {}) if isinstance(value, dict) else {}
                found += [value] if value else []
    return found[0]


@pytest.mark.parametrize("path", BODIES)
def test_every_api_gives_receipts(path: str, http: httpx.Client) -> None:
    """Under the id of its answer, streamed or not, and under the receipt's own."""
    (receipt,) = receipts(http, ask(http, path)["id"])
    assert receipt.statement.choice["seed"] == 3
    assert receipt.statement.samples[0].num_tokens == len(receipt.evidence.samples[0].token_ids)
    assert receipt.statement.engine == {"quire": "test"}
    assert receipt.is_signed_by(KEY)
    assert receipts(http, streamed_id(http, path)) == [receipt]
    assert receipts(http, receipt.id)[0] == receipt


def test_answers_do_not_change(http: httpx.Client) -> None:
    """But for ids and times: log-probabilities are for the receipt alone."""
    for path in BODIES:
        for more in ({}, {"logprobs": 2} if path == "/v1/completions" else {}):
            plain = ask(http, path, deterministic=False, **more)
            with_receipt = ask(http, path, **more)
            for each in (plain, with_receipt):
                for name in ("id", "created", "created_at", "completed_at"):
                    each.pop(name, None)
            assert _without_ids(plain) == _without_ids(with_receipt), path


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name != "id"}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def test_each_prompt_and_sample_has_its_own(http: httpx.Client) -> None:
    made = ask(http, "/v1/completions", prompt=[[5, 6], [7, 8, 9]], n=2)
    found = receipts(http, made["id"])
    assert sorted(each.evidence.prompt_token_ids for each in found) == [[5, 6], [7, 8, 9]]
    assert all(len(each.statement.samples) == 2 for each in found)


def test_stop_strings_and_parsed_answers(http: httpx.Client) -> None:
    """A receipt holds the tokens that belong to the answer, and no more."""
    ids = {"return_token_ids": True}
    whole = ask(http, "/v1/completions", **ids)["choices"][0]
    stop = whole["text"][2:4]
    cut = ask(http, "/v1/completions", stop=[stop], **ids)
    (receipt,) = receipts(http, cut["id"])
    (sample,) = receipt.statement.samples
    assert receipt.evidence.samples[0].token_ids == cut["choices"][0]["token_ids"]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_responses_include_it(http: httpx.Client) -> None:
    made = ask(http, "/v1/responses", include=["receipt"])
    (receipt,) = receipts(http, made["id"])
    assert read_receipts(json.dumps(made["receipt"]).encode()) == [receipt]
    assert http.get(f"/v1/responses/{made['id']}").json()["receipt"] == made["receipt"]
    assert "receipt" not in ask(http, "/v1/responses")
    reply = http.post("/v1/responses", json={"input": "hi", "include": ["receipt"]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "include"


def test_callers_see_their_own(http: httpx.Client, server: RunningServer) -> None:
    made = ask(http, "/v1/completions", request_id="mine")
    assert receipts(http, "mine")
    (receipt,) = receipts(http, made["id"])
    other = {"authorization": f"Bearer {KEYS[1]}"}
    for name in ("mine", made["id"], receipt.id):
        assert waiting.get(f"{server.url}/receipts/{name}", headers=other).status_code == 404
    assert waiting.get(f"{server.url}/receipts/{receipt.id}").status_code == 401


def test_no_receipt_without_asking(http: httpx.Client) -> None:
    made = ask(http, "/v1/completions", deterministic=False)
    reply = http.get(f"/receipts/{made['id']}")
    assert reply.status_code == 404
    assert "deterministic" in reply.json()["error"]["message"]


def test_an_aborted_answer_has_none(http: httpx.Client, server: RunningServer) -> None:
    body = {**BODIES["/v1/completions"], "deterministic": True, "max_tokens": 200}
    more = {"stream": True, "request_id": "cut", "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json={**body, **more}) as reply:
        next(reply.iter_lines())
    server.wait_until_idle()
    assert http.get("/receipts/cut").status_code == 404


def test_a_receipt_is_kept_beside_other_work(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the event loop stands still while a long receipt is encoded, or another front
    writes."""
    with ThreadPoolExecutor(1) as pool, held_up(monkeypatch, ReceiptStore, "put") as begun:
        asked = pool.submit(ask, http, "/v1/completions")
        assert begun.wait(waiting.WAIT_S)
        assert waiting.get(f"{server.url}/livez").status_code == 200
    assert receipts(http, asked.result()["id"])


def test_what_cannot_be_promised_is_refused(http: httpx.Client, front: ModelFront) -> None:
    reply = http.post(
        "/v1/completions", json={"prompt": "a", "deterministic": True, "hooks": ["three"]}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "deterministic"
    assert "hooks may change it" in reply.json()["error"]["message"]
    unstable = EngineFacts(unstable="a GPU computes")
    with running_server(front, client=InMemoryClient(facts=unstable)) as other:
        for path, body in BODIES.items():
            reply = waiting.post(f"{other.url}{path}", json={**body, "deterministic": True})
            assert reply.status_code == 400, path
            assert "a GPU computes" in reply.text
            assert waiting.post(f"{other.url}{path}", json=body).status_code == 200


# --- the store and the key ------------------------------------------------------------------------


def test_the_store_is_bounded() -> None:
    now = [1000.0]
    size = len(receipt_of().to_json())
    limits = Limits(max_receipts=3, max_receipt_bytes=int(2.5 * size), receipt_s=60)
    store = ReceiptStore(limits, None, clock=lambda: now[0])
    for number in range(5):
        store.put(receipt_of(), Timeline(f"r{number}", "/", "a"))
        now[0] += 1
    assert store.num_kept == 2
    assert store.num_bytes <= limits.max_receipt_bytes
    store.put(receipt_of(), Timeline("other", "/", "b"))
    assert store.find("other", "b")
    with pytest.raises(RefusedError):
        store.find("r0", "a")
    now[0] += 61
    with pytest.raises(RefusedError):
        store.find("other", "b")
    store.close()


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ReceiptStore(Limits(), None, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has mode 0640"):
        ReceiptStore(Limits(), None, str(key_file(tmp_path, 0o640)))
    with pytest.raises(ConfigError, match="5 bytes"):
        ReceiptStore(Limits(), None, str(key_file(tmp_path, key=b"short")))


# --- a real server --------------------------------------------------------------------------------

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
FLAGS = (
    "--num-kv-blocks", "72", "--max-model-len", "256", "--max-num-seqs", "16", "--num-threads", "1",
    "--speculative-config", DRAFTS,
)  # fmt: skip
NUM_STREAMS = 16


def load(url: str, turn: int) -> None:
    """Streams at once, in the order of their numbers."""

    def stream(index: int) -> None:
        body = {
            "prompt": [5 + index, 17, 301, 42, 8] * (3 + index % 4),
            "max_tokens": 60,
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": index,
            "ignore_eos": True,
            "stream": bool(index % 3),
            "deterministic": True,
            "request_id": f"{turn}.{index}",
        }
        reply = waiting.post(f"{url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert '"error"' not in reply.text

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(stream, range(NUM_STREAMS)))


def kept(url: str, turn: int) -> list[bytes]:
    """Receipts by the number of their stream."""
    return [waiting.get(f"{url}/receipts/{turn}.{index}").content for index in range(NUM_STREAMS)]


def metric(url: str, name: str) -> float:
    lines = waiting.get(f"{url}/metrics").text.splitlines()
    return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(f"vllm:{name}"))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not has_kernels(), reason="torch sums rows by their number")
def test_receipts_of_a_loaded_server_are_made_again(
    short_tmp: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """16 streams with drafts and preemption, in one of two turns with a kill of the core, have the
    same receipts; a fresh engine with another batch size says that they are equal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    key = key_file(tmp_path)
    with serving_by_command(short_tmp, *FLAGS, "--receipt-key", str(key), is_forked=True) as server:
        url = server.wait_until_ready()
        load(url, 0)
        wait_for(lambda: metric(url, "num_preemptions") > 0, "a preemption")
        before = metric(url, "generation_tokens")
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(load, url, 1)
            wait_for(lambda: metric(url, "generation_tokens") > before, "tokens")
            (core,) = children(server.process.pid)
            os.kill(int(core), signal.SIGKILL)
            under_way.result()
        wait_for(lambda: core not in children(server.process.pid), "another core")
        first, second = kept(url, 0), kept(url, 1)
    assert first == second
    for index, content in enumerate(first):
        file = tmp_path / f"{index}.json"
        file.write_bytes(content)
        if index % 5 == 0:
            flags = ("--max-num-seqs", "2", "--receipt-key", str(key))
            assert main(["replay", str(file), *flags]) == 0, capsys.readouterr()
            assert capsys.readouterr().out.startswith("equal: 1 answer, 60 tokens")
