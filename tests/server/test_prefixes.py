"""Pinned prefixes of a server: the routes, the operator's files, and what becomes of both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.base.errors import ConfigError
from quire.engine.model_front import ModelFront
from quire.protocol.control import ListPins, Unpin
from quire.protocol.messages import Welcome
from quire.protocol.status import EngineState
from quire.server.prefixes.files import RenderedPrefix, read_prefix_files, render_prefixes
from quire.server.prefixes.pinning import PrefixKeeper, pin_prefix
from quire.server.settings import ServerSettings
from tests import waiting
from tests.engine.fake_core_process import FakeCoreOptions
from tests.engine.process_harness import ask, collect, hosted, run, until_state
from tests.engine.test_replicas import clients_of, replicas
from tests.forked import name_of
from tests.server import in_memory
from tests.server.running import RunningServer, running_server
from tests.server.test_run import CODE, children, serving
from tests.waiting import WAIT_S, wait_for

PREFIXES = "/admin/prefixes"
IDS = list(range(300, 341))  # two blocks of sixteen and a tail of nine
KEYS = ("a" * 16, "b" * 16)


@pytest.fixture
def keyed(front: ModelFront) -> Iterator[tuple[httpx.Client, httpx.Client, RunningServer]]:
    """Clients with two different keys."""
    settings = ServerSettings(api_key=KEYS, disable_access_log=True)
    with running_server(front, settings) as server:
        clients = [
            waiting.PatientClient(base_url=server.url, headers={"x-api-key": key}) for key in KEYS
        ]
        yield clients[0], clients[1], server
        for client in clients:
            client.close()


def pin(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post(PREFIXES, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def listed(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get(PREFIXES).json()["prefixes"]


def num_cached(http: httpx.Client, prompt: object, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_pin_list_hit_unpin(http: httpx.Client) -> None:
    pinned = pin(http, prompt=IDS)
    assert (pinned["tokens"], pinned["blocks"], pinned["hits"]) == (41, 3, 0)
    assert pinned["seconds_left"] is None and not pinned["shared"]
    assert num_cached(http, [*IDS, 7]) == 41
    assert num_cached(http, [*IDS, 7], cache_salt="mine") == 0
    assert listed(http) == [{**pinned, "hits": 1}]
    path = f"{PREFIXES}/{pinned['id']}"
    assert http.delete(path).json() == {"id": pinned["id"], "deleted": True}
    assert http.delete(path).status_code == 404
    assert listed(http) == []


def test_equal_texts_are_one_pin(http: httpx.Client) -> None:
    first = pin(http, prompt=IDS, ttl_s=100)
    again = pin(http, prompt=IDS)
    assert (again["id"], again["seconds_left"]) == (first["id"], None)
    other = pin(http, prompt=IDS, cache_salt="mine")
    assert {each["id"] for each in listed(http)} == {first["id"], other["id"]}
    for each in (first, other):
        assert http.delete(f"{PREFIXES}/{each['id']}").status_code == 200
    assert listed(http) == []


def test_messages_are_pinned_as_chats_render_them(http: httpx.Client) -> None:
    system = {"role": "system", "content": "You are a short-spoken clerk of the harbour."}
    pinned = pin(http, messages=[system], cache_salt="mine", ttl_s=6000)
    assert 5000 < pinned["seconds_left"] <= 6000
    body = {
        "messages": [system, {"role": "user", "content": "Hello"}],
        "max_tokens": 2,
        "cache_salt": "mine",
    }
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == pinned["tokens"]
    assert http.delete(f"{PREFIXES}/{pinned['id']}").status_code == 200


def test_a_pin_ends_by_itself(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(http, prompt="The quick brown fox jumps", ttl_s=500.0)
    assert len(listed(http)) == 1
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 500.0)
    monkeypatch.setattr(in_memory, "time", later)
    wait_for(lambda: listed(http) == [], "end of the pin")
    assert num_cached(http, "Something else") == 0  # and the step lets its blocks go


def test_a_pin_that_cannot_last_is_the_clients_fault(http: httpx.Client) -> None:
    """Not 503, after which a client would try again."""
    reply = http.post(PREFIXES, json={"prompt": "x", "ttl_s": 1e-9})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "ttl_s"
    assert num_cached(http, "Something else") == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": []}, "either prompt or messages"),
        ({"messages": []}, "messages is empty"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "x", "ttl_s": 0}, "ttl_s is 0"),
        ({"prompt": "x", "ttl_s": "long"}, "ttl_s: expected"),
        ({"prompt": "x", "cache_salt": "ü"}, "cache_salt is"),
        ({"prompt": [99_999_999]}, "99999999"),
        ({"prompt": [5] * 600}, "maximum context length is 512"),
        ({"prompt": "x", "tll_s": 3}, "Did you mean 'ttl_s'"),
    ],
)
def test_what_cannot_be_pinned(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = http.post(PREFIXES, json=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert listed(http) == []


def test_no_more_than_half_of_the_cache_is_pinned(http: httpx.Client) -> None:
    """512 blocks; a prefix of 500 tokens takes 32."""
    ids = [pin(http, prompt=[i] * 500)["id"] for i in range(8)]
    reply = http.post(PREFIXES, json={"prompt": [9] * 500})
    assert reply.status_code == 400
    assert "only 0 more may be pinned" in reply.json()["error"]["message"]
    for each in ids:
        assert http.delete(f"{PREFIXES}/{each}").status_code == 200


def test_keys_see_and_end_their_own_pins(
    keyed: tuple[httpx.Client, httpx.Client, RunningServer],
) -> None:
    one, two, server = keyed
    assert waiting.get(server.url + PREFIXES).status_code == 401
    pinned = pin(one, prompt=IDS)
    assert listed(one) == [pinned] and listed(two) == []
    assert two.delete(f"{PREFIXES}/{pinned['id']}").status_code == 404
    assert num_cached(two, [*IDS, 7]) == 0
    assert num_cached(one, [*IDS, 7]) == 41
    assert one.delete(f"{PREFIXES}/{pinned['id']}").status_code == 200


def test_the_operators_prefix_is_for_all_keys(
    keyed: tuple[httpx.Client, httpx.Client, RunningServer],
) -> None:
    one, two, server = keyed
    keeper = PrefixKeeper(server.client, [RenderedPrefix("harbour.txt", IDS)])
    asyncio.run_coroutine_threadsafe(keeper.start(), server.loop).result(WAIT_S)
    for client in (one, two):
        assert num_cached(client, [*IDS, 7]) == 41
        (found,) = listed(client)
        assert (found["name"], found["shared"], found["tokens"]) == ("harbour.txt", True, 41)
        reply = client.delete(f"{PREFIXES}/{found['id']}")
        assert reply.status_code == 403
        assert "by the operator" in reply.json()["error"]["message"]


def test_prefixes_are_pinned_on_every_core() -> None:
    prefixes = [RenderedPrefix("one", [1, 2, 3, 4, 5]), RenderedPrefix("two", [6, 7])]

    async def work() -> None:
        async with hosted(wait=False) as host:
            keeper = PrefixKeeper(host.client, prefixes)
            await keeper.start()
            await keeper.start()  # what is there is not pinned again
            pins = (await host.client.control(ListPins())).pins
            assert [held.name for held in pins] == ["one", "two"]
            keeping = asyncio.ensure_future(keeper.keep())
            for _ in range(2):
                os.kill(host.supervisor.pid, signal.SIGKILL)
                await until_state(host.client, EngineState.RESTARTING)
                await until_state(host.client, EngineState.READY)
                while len((await host.client.control(ListPins())).pins) < 2:
                    await asyncio.sleep(0.02)
                assert all(held.is_shared for held in (await host.client.control(ListPins())).pins)
            keeping.cancel()

    run(work())


def test_a_prefix_that_was_let_go_comes_back() -> None:
    """Fault: one large request costs the operator's prefix for as long as the core lives."""
    prefix = list(range(40, 63))

    async def work() -> None:
        options = FakeCoreOptions(num_blocks=14, max_model_len=56)
        async with hosted(options) as host:
            keeper = PrefixKeeper(host.client, [RenderedPrefix("one", prefix)], look_s=0.05)
            await keeper.start()
            keeping = asyncio.ensure_future(keeper.keep())
            (first,) = (await host.client.control(ListPins())).pins
            await collect(await ask(host.client, list(range(100, 150)), max_tokens=4))
            while (pins := (await host.client.control(ListPins())).pins) in ((), (first,)):
                await asyncio.sleep(0.02)
            assert pins[0].key == first.key
            await host.client.control(Unpin(pins[0].handle))
            await asyncio.sleep(0.2)  # several looks: a released prefix stays away
            assert (await host.client.control(ListPins())).pins == ()
            keeping.cancel()

    run(work())


def test_a_prefix_that_is_refused_keeps_no_other_away(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: the next core does not pin the prefixes behind it in the list again."""
    prefixes = [RenderedPrefix("large", list(range(40, 60))), RenderedPrefix("small", [6, 7])]

    def refusals() -> list[str]:
        texts = (each.getMessage() for each in caplog.records)
        return [text for text in texts if "is refused" in text]

    async def work() -> None:
        async with hosted(FakeCoreOptions(num_blocks=14, max_model_len=56)) as host:
            held = await pin_prefix(host.client, "other", list(range(60, 80)))
            keeper = PrefixKeeper(host.client, prefixes, look_s=0.05)
            keeping = asyncio.ensure_future(keeper.keep())
            while not refusals():  # told once all of the list has been tried
                await asyncio.sleep(0.02)
            pins = (await host.client.control(ListPins())).pins
            assert [pin.name for pin in pins] == ["other", "small"]
            await host.client.control(Unpin(pins[1].handle))
            await asyncio.sleep(0.2)  # several looks
            assert (await host.client.control(ListPins())).pins == (held,)
            keeping.cancel()

    run(work())
    assert len(refusals()) == 1 and "prefix large" in refusals()[0]


def test_prefixes_are_pinned_on_every_replica() -> None:
    """Fault: one that becomes ready later, or comes back, never has them."""

    async def work() -> None:
        async with replicas() as host:
            keeper = PrefixKeeper(host.client, [RenderedPrefix("one", [1, 2, 3, 4, 5])])
            second = clients_of(host)[1]
            watch, capacity = second._watch, second.status.capacity
            instance = watch.instance
            assert instance is not None and capacity is not None
            watch.disconnected()  # as if it were still to come
            await keeper.start()
            assert len((await clients_of(host)[0].control(ListPins())).pins) == 1
            keeping = asyncio.ensure_future(keeper.keep())
            await asyncio.sleep(0.05)
            watch.connected(Welcome(instance, capacity))
            while not (await second.control(ListPins())).pins:
                await asyncio.sleep(0.02)
            for index in 0, 1:
                os.kill(host.supervisors[index].pid or 0, signal.SIGKILL)
                late = clients_of(host)[index]
                await until_state(late, EngineState.RESTARTING)
                await until_state(late, EngineState.READY)
                while not (await late.control(ListPins())).pins:
                    await asyncio.sleep(0.02)
            keeping.cancel()

    run(work())


def test_a_prefix_that_is_too_large_ends_the_start() -> None:
    async def work() -> None:
        async with hosted(FakeCoreOptions(num_blocks=8)) as host:
            keeper = PrefixKeeper(host.client, [RenderedPrefix("large", [1] * 24)])
            with pytest.raises(ConfigError, match="takes 6 KV blocks, but of the 8"):
                await keeper.start()

    run(work())


def test_files_of_texts_and_messages(tmp_path: Path, front: ModelFront) -> None:
    text, chat = tmp_path / "policy.txt", tmp_path / "clerk.json"
    text.write_text("Größe\nzwei\n", encoding="utf-8-sig")
    messages = [{"role": "system", "content": "You are a clerk."}]
    chat.write_text(json.dumps(messages), encoding="utf-8-sig")
    files = read_prefix_files([str(text), str(chat), str(text)])
    assert [file.content for file in files] == ["Größe\nzwei", messages]
    first, second = render_prefixes(files, front.renderer)
    assert first.token_ids == front.renderer.render_prompt("Größe\nzwei").token_ids
    whole = front.renderer.render_chat([*messages, {"role": "user", "content": "Hi"}]).token_ids
    assert whole[: len(second.token_ids)] == second.token_ids


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "cannot be read"),
        ("broken.txt", b"\xff\xfe", "not UTF-8"),
        ("broken.json", b"{", "is not JSON"),
        ("empty.json", b"[]", "no list of messages"),
        ("object.json", b'{"role": "system"}', "no list of messages"),
        ("roleless.json", b'[{"content": "x"}]', "no list of messages"),
        ("empty.txt", b"\n", "cannot be a prompt"),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, front: ModelFront, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        render_prefixes(read_prefix_files([str(tmp_path / name)]), front.renderer)
    assert name in str(caught.value)


@pytest.mark.parametrize("num_fronts", [1, 2])
def test_the_whole_command_pins_files_and_pins_them_again(
    short_tmp: Path, tmp_path: Path, num_fronts: int
) -> None:
    """Pinned once, although there are several fronts; and again by the next core. With several, all
    processes are spawned."""
    file = tmp_path / "harbour.txt"
    file.write_text("The harbour master keeps a list of all ships that have come in since May.\n")
    settings = f"api_server_count={num_fronts}, pin_prefix=({str(file)!r},), uds="
    code = CODE.replace("uds=", settings)
    with serving(short_tmp, code=code, is_forked=num_fronts == 1) as server:
        wait_for(lambda: "startup complete" in server.text, "start")
        url = server.wait_until_ready()
        with waiting.PatientClient(base_url=url) as http:
            (found,) = listed(http)
            assert (found["name"], found["shared"], found["hits"]) == (str(file), True, 0)
            text = file.read_text().removesuffix("\n")
            assert num_cached(http, text + " And more") == found["tokens"]
            core = next(child for child in children(server.process.pid) if is_core(child))
            os.kill(int(core), signal.SIGKILL)
            wait_for(lambda: is_pinned_again(http), "pin of the next core")
            assert num_cached(http, text + " And more") == found["tokens"]
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert server.text.count("Pinned") == 2


def is_core(process: object) -> bool:
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    return b"core_process" in command or name_of(str(process)) == "real_core_process"[:15]


def is_pinned_again(http: httpx.Client) -> bool:
    reply = http.get(PREFIXES)
    return reply.status_code == 200 and [p["hits"] for p in reply.json()["prefixes"]] == [0]


def test_a_file_that_is_missing_ends_the_start(short_tmp: Path) -> None:
    code = CODE.replace("uds=", "pin_prefix=('/no/such/file',), uds=")
    with serving(short_tmp, code=code, is_forked=True) as server:
        assert server.end() == 1
    assert "ConfigError: The file of --pin-prefix cannot be read: /no/such/file" in server.text
