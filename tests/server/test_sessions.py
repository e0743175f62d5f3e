"""Conversations by `session_id`: a turn sends what is new, and the server has the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.errors import EngineError
from quire.engine.clients.async_client import UpdateStream
from quire.protocol import EngineRequest
from quire.protocol.control import AdminOp, ListPins, Report, Unpin
from quire.server.generation.backend import Backend, ServedModel
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.routes.services import Services
from quire.server.sessions.pins import SessionPins
from quire.server.sessions.store import Session, SessionStore
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTIONS = ("How old is the sea?", "And the moon?", "Which of them is larger?")
KEYS = ("a" * 32, "b" * 32)


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with waiting.PatientClient(base_url=server.url) as client:
        yield client
        for session in client.get("/admin/sessions").json()["sessions"]:
            client.delete(f"/admin/sessions/{session['id']}")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def post(http: httpx.Client, route: str, **body: Any) -> dict[str, Any]:
    reply = http.post(route, json={"model": MODEL, "seed": 3, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(http: httpx.Client, messages: list[Any], **more: Any) -> dict[str, Any]:
    asked = {"max_tokens": 12, "return_token_ids": True, **more}
    return post(http, "/v1/chat/completions", messages=messages, **asked)


def answer_of(found: dict[str, Any]) -> str:
    return found["choices"][0]["message"]["content"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_goes_on(http: httpx.Client, server: RunningServer, streams: bool) -> None:
    """Each prompt is the tokens of the one before, its answer, and what is new."""
    before: list[int] = []
    for number, question in enumerate(QUESTIONS):
        messages = [SYSTEM, user(question)] if not number else [user(question)]
        found: dict[str, Any] = {}
        if streams:
            body = {"model": MODEL, "messages": messages, "session_id": "s", "max_tokens": 12}
            reply = http.post("/v1/chat/completions", json={**body, "stream": True})
            assert reply.text.rstrip().endswith("[DONE]")
        else:
            found = chat(http, messages, session_id="s")
        request = server.call(lambda: server.client.added[-1])
        prompt = request.prompt_token_ids.tolist()
        (session,) = http.get("/admin/sessions").json()["sessions"]
        assert session["id"] == "s" and session["turns"] == number + 1
        assert session["messages"] == 2 * (number + 1) + 1
        if not streams:
            assert found["prompt_token_ids"] == prompt
            assert session["tokens"] == len(prompt) + len(found["choices"][0]["token_ids"])
        assert len(prompt) > len(before)
        before = prompt


def test_a_session_is_the_whole_conversation(http: httpx.Client) -> None:
    """The answer is the same as if the client had sent all of it."""
    messages: list[Any] = [SYSTEM]
    for question in QUESTIONS:
        messages.append(user(question))
        given = messages if len(messages) == 2 else [user(question)]
        by_session = chat(http, given, session_id="one")
        whole = chat(http, messages)
        decoded = [
            http.post("/detokenize", json={"tokens": each["prompt_token_ids"]}).json()["prompt"]
            for each in (by_session, whole)
        ]
        assert decoded[0] == decoded[1]
        messages.append({"role": "assistant", "content": answer_of(by_session)})


def test_a_whole_conversation_stands_in_place_of_the_one_before(http: httpx.Client) -> None:
    """Fault: a client that names a session and sends everything has everything twice."""
    first = chat(http, [user(QUESTIONS[0])], session_id="s")
    whole = [
        user(QUESTIONS[0]), {"role": "assistant", "content": answer_of(first)}, user(QUESTIONS[1])
    ]  # fmt: skip
    chat(http, whole, session_id="s")
    (session,) = http.get("/admin/sessions").json()["sessions"]
    assert session["messages"] == 4 and session["turns"] == 2


def test_instructions_replace_those_before(http: httpx.Client, server: RunningServer) -> None:
    chat(http, [SYSTEM, user(QUESTIONS[0])], session_id="s")
    found = chat(http, [{"role": "system", "content": "Be long."}, user("And?")], session_id="s")
    text = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    assert "Be long." in text and "Be brief." not in text and QUESTIONS[0] in text


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_other_apis_go_on_too(http: httpx.Client, server: RunningServer, route: str) -> None:
    for number, question in enumerate(QUESTIONS):
        if route == "/v1/messages":
            post(http, route, messages=[user(question)], max_tokens=8, session_id="s")
        else:
            post(http, route, input=question, max_output_tokens=8, session_id="s")
        (session,) = http.get("/admin/sessions").json()["sessions"]
        assert (session["turns"], session["messages"]) == (number + 1, 2 * (number + 1))


def test_a_turn_that_fails_changes_nothing(http: httpx.Client, server: RunningServer) -> None:
    chat(http, [user(QUESTIONS[0])], session_id="s")
    server.call(lambda: setattr(server.client, "fail_after", 2))
    body = {"model": MODEL, "messages": [user("And?")], "session_id": "s", "max_tokens": 50}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 500
    (session,) = http.get("/admin/sessions").json()["sessions"]
    assert session["turns"] == 1 and session["messages"] == 2


def test_the_admin_route(http: httpx.Client, server: RunningServer) -> None:
    first = chat(http, [user(QUESTIONS[0])], session_id="s")
    reply = http.post("/admin/sessions/s", json={"pinned": True, "ttl_s": 500})
    assert reply.status_code == 200, reply.text
    assert reply.json()["pinned"] and reply.json()["ttl_s"] == 500
    pins = http.get("/admin/prefixes").json()["prefixes"]
    assert [pin["name"] for pin in pins] == ["session-s"]
    assert pins[0]["tokens"] == reply.json()["tokens"]
    found = chat(http, [user("And?")], session_id="s")
    num_cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= first["usage"]["prompt_tokens"] - 16
    assert http.get("/admin/sessions").json()["sessions"][0]["pinned"]
    assert http.delete("/admin/sessions/s").status_code == 200
    assert not http.get("/admin/prefixes").json()["prefixes"]
    assert not http.get("/admin/sessions").json()["sessions"]
    for reply in (http.delete("/admin/sessions/s"), http.post("/admin/sessions/s", json={})):
        assert reply.status_code == 404 and "no session 's'" in reply.text


def pins_of(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get("/admin/prefixes").json()["prefixes"]


def test_a_pin_follows_its_session(http: httpx.Client, server: RunningServer) -> None:
    """Fault: the K/V of a pinned session ended before it, or outlived it, and a new turn was not
    pinned."""
    chat(http, [user(QUESTIONS[0])], session_id="s")
    http.post("/admin/sessions/s", json={"pinned": True, "ttl_s": 50})
    http.post("/admin/sessions/s", json={"ttl_s": 500})
    (pin,) = pins_of(http)
    assert 400 < pin["seconds_left"] <= 500
    chat(http, [user(QUESTIONS[1])], session_id="s")
    (session,) = http.get("/admin/sessions").json()["sessions"]
    waiting.wait_for(
        lambda: [each["tokens"] for each in pins_of(http)] == [session["tokens"]], "another pin"
    )
    http.post("/admin/sessions/s", json={"ttl_s": 50})
    (pin,) = pins_of(http)
    assert pin["seconds_left"] <= 50
    assert not http.post("/admin/sessions/s", json={"pinned": False}).json()["pinned"]
    assert not pins_of(http)


def test_a_session_that_cannot_be_pinned_is_not(http: httpx.Client, server: RunningServer) -> None:
    """Fault: a session is shown as pinned, with a new ttl, though its K/V are not held."""
    chat(http, [user(QUESTIONS[0])], session_id="s")
    http.post("/admin/sessions/s", json={"ttl_s": 500})

    async def failing(_: EngineRequest) -> UpdateStream:
        raise EngineError("there is no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.client, "add", failing)
        reply = http.post("/admin/sessions/s", json={"pinned": True, "ttl_s": 50})
    assert reply.status_code == 503 and "no room" in reply.text
    (session,) = http.get("/admin/sessions").json()["sessions"]
    assert (session["pinned"], session["ttl_s"]) == (False, 500)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_pin_that_stayed_can_be_let_go_later(
    http: httpx.Client, server: RunningServer, is_deleted: bool
) -> None:
    """Fault: after one failed try no call lets the K/V of a session go."""

    def let_go() -> httpx.Response:
        if is_deleted:
            return http.delete("/admin/sessions/s")
        return http.post("/admin/sessions/s", json={"pinned": False})

    chat(http, [user(QUESTIONS[0])], session_id="s")
    http.post("/admin/sessions/s", json={"pinned": True})
    control = server.client.control

    async def failing(op: AdminOp) -> Report:
        if isinstance(op, Unpin):
            raise EngineError("the engine is busy")
        return await control(op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.client, "control", failing)
        assert let_go().status_code == 503
    assert len(pins_of(http)) == 1
    assert let_go().status_code == (404 if is_deleted else 200)
    assert not pins_of(http)


def test_the_pin_of_a_turn_stays_until_the_next_has_one(
    http: httpx.Client, server: RunningServer
) -> None:
    """Fault: the K/V of a pinned session may be evicted while those of its next turn wait."""
    chat(http, [user(QUESTIONS[0])], session_id="s")
    http.post("/admin/sessions/s", json={"pinned": True})
    add, num_held = server.client.add, list[int]()

    async def noting(request: EngineRequest) -> UpdateStream:
        if request.pin_seconds is not None:
            num_held.append(len((await server.client.control(ListPins())).pins))
        return await add(request)

    (before,) = pins_of(http)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.client, "add", noting)
        chat(http, [user(QUESTIONS[1])], session_id="s")
        waiting.wait_for(
            lambda: len(pins := pins_of(http)) == 1 and pins[0]["id"] != before["id"], "a pin"
        )
    assert num_held == [1]


def test_a_turn_takes_the_room_of_the_one_before() -> None:
    """Fault: a session that takes more than half of what may be pinned loses its pin."""
    client = InMemoryClient(num_blocks=40)
    with (
        running_server(bundled_front(), client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        chat(http, [user("sea " * 90)], session_id="s")
        reply = http.post("/admin/sessions/s", json={"pinned": True})
        assert reply.status_code == 200, reply.text
        (pin,) = pins_of(http)
        assert pin["blocks"] > 10
        chat(http, [user(QUESTIONS[1])], session_id="s")
        (session,) = http.get("/admin/sessions").json()["sessions"]
        waiting.wait_for(
            lambda: [each["tokens"] for each in pins_of(http)] == [session["tokens"]], "another pin"
        )
        assert http.get("/admin/sessions").json()["sessions"][0]["pinned"]
    client.engine.core.shutdown()


def backend_of(client: InMemoryClient) -> Backend:
    backend = Backend()
    backend.serve(client)
    no_text: Any = None
    backend.set_model(ServedModel(("name",), "root", 0, no_text))
    return backend


def pinned_session(store: SessionStore, token_ids: list[int]) -> Session:
    store.put(Session("s", token_ids=token_ids), "")
    return store.change("s", "", is_pinned=True)


def next_turn(store: SessionStore) -> None:
    turn = store.required("s", "")
    turn.token_ids += [7] * 20
    assert store.put(turn, "")


def test_fronts_that_settle_at_once_keep_the_pin(tmp_path: Path) -> None:
    """Fault: each lets go what the other has pinned, and the session is pinned no more."""

    async def work() -> None:
        client = InMemoryClient(step_s=0.001)
        backend = backend_of(client)
        stores = [SessionStore(Limits(), tmp_path / "s.sqlite") for _ in range(2)]
        fronts = [SessionPins(store, backend) for store in stores]
        pinned_session(stores[0], [5] * 40)
        for _ in range(5):
            settling = [asyncio.create_task(front.settle("s", "", 1.0)) for front in fronts]
            await asyncio.sleep(0.002)
            next_turn(stores[1])
            await asyncio.gather(*settling, fronts[1].settle("s", "", 1.0))
            (pin,) = (await client.control(ListPins())).pins
            found = stores[0].pinned("s", "")
            assert found is not None and pin.num_tokens == len(found.session.token_ids)
        client.engine.core.shutdown()

    asyncio.run(work())


def test_a_pin_that_fails_leaves_that_of_a_later_turn() -> None:
    """Fault: the next turn loses the pin that one turn could not have."""

    async def work() -> None:
        client, store = InMemoryClient(), SessionStore(Limits(), None)
        pinned_session(store, [5] * 40)
        add = client.add

        async def failing(request: EngineRequest) -> UpdateStream:
            if len(request.prompt_token_ids) > 40:
                return await add(request)
            next_turn(store)
            raise EngineError("it was let go")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "add", failing)
            await SessionPins(store, backend_of(client)).settle("s", "", 1.0)
        assert [pin.num_tokens for pin in (await client.control(ListPins())).pins] == [60]
        client.engine.core.shutdown()

    asyncio.run(work())


def test_the_end_of_a_server_waits_for_settlings() -> None:
    """Fault: one that is cancelled uses a database that is closed."""
    errors: list[object] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: errors.append(found))
        client = InMemoryClient()
        client.paused = True
        services = Services(ServerSettings(), backend_of(client), None, 0)
        session = pinned_session(services.sessions, [5] * 40)
        services.session_pins.follow(session, "", 1.0)
        while not client.added:
            await asyncio.sleep(0.001)
        await services.close()
        services.session_pins.follow(session, "", 1.0)
        assert len(asyncio.all_tasks()) == 2, "this one, and the engine's"
        client.engine.core.shutdown()

    asyncio.run(work())
    assert not errors


def test_what_makes_room_lets_its_pin_go() -> None:
    """Fault: the K/V of an evicted session stay pinned."""
    settings = ServerSettings(disable_access_log=True, limits=Limits(max_sessions=1))
    with (
        running_server(bundled_front(), settings) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        chat(http, [user(QUESTIONS[0])], session_id="one")
        http.post("/admin/sessions/one", json={"pinned": True})
        assert len(pins_of(http)) == 1
        chat(http, [user(QUESTIONS[0])], session_id="other")
        waiting.wait_for(lambda: not pins_of(http), "an end of the pin")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "n is given with session_id"),
        ({"session_id": ""}, "session_id is empty"),
        ({"session_id": "é"}, "session_id"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is given"),
    ],
    ids=str,
)
def test_bad_requests(http: httpx.Client, more: dict[str, Any], words: str) -> None:
    body = {"model": MODEL, "messages": [user("hi")], "session_id": "s", **more}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and words in reply.text, reply.text


def test_both_ways_to_go_on_are_refused(http: httpx.Client) -> None:
    body = {"input": "hi", "session_id": "s", "previous_response_id": "resp_1"}
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 400 and "Send one of them" in reply.text


def test_keys_see_their_own() -> None:
    settings = ServerSettings(disable_access_log=True, api_key=KEYS)
    with (
        running_server(bundled_front(), settings) as server,
        waiting.PatientClient(base_url=server.url, headers={"x-api-key": KEYS[0]}) as one,
        waiting.PatientClient(base_url=server.url, headers={"x-api-key": KEYS[1]}) as other,
    ):
        chat(one, [user(QUESTIONS[0])], session_id="s")
        assert not other.get("/admin/sessions").json()["sessions"]
        chat(other, [user("And?")], session_id="s")
        for client in (one, other):
            (session,) = client.get("/admin/sessions").json()["sessions"]
            assert session["turns"] == 1
        assert other.delete("/admin/sessions/s").status_code == 200
        assert one.get("/admin/sessions").json()["sessions"]


def test_bounds(tmp_path: Path) -> None:
    now = 1000.0
    limits = Limits(max_sessions=3, max_session_bytes=4000, session_s=100)
    store = SessionStore(limits, tmp_path / "s.sqlite", lambda: now)
    for name in "abcd":
        assert store.put(Session(name), "")
        now += 1
    assert [each.id for each, _ in store.listed("")] == ["d", "c", "b"]
    store.change("b", "", is_pinned=True)
    now += 1
    store.put(Session("e"), "")
    assert [each.id for each, _ in store.listed("")] == ["e", "b", "d"]
    store.put(Session("f", messages=[{"content": "x" * 3900}]), "")
    assert [each.id for each, _ in store.listed("")] == ["f"]
    now += 101
    assert not store.listed("") and store.find("f", "") is None
    with pytest.raises(RefusedError, match="no session 'f'"):
        store.required("f", "")


def test_the_first_of_two_turns_is_kept() -> None:
    store = SessionStore(Limits(), None)
    store.put(Session("s"), "")
    one, other = store.required("s", ""), store.required("s", "")
    one.messages, other.messages = [{"content": "1"}], [{"content": "2"}]
    assert store.put(one, "") and not store.put(other, "")
    assert store.required("s", "").messages == [{"content": "1"}]


def test_a_turn_does_not_bring_back_what_is_deleted() -> None:
    """Fault: a conversation that is deleted while its next turn is made is there again."""
    store = SessionStore(Limits(), None)
    store.put(Session("s", messages=[{"content": "secret"}]), "")
    turn = store.required("s", "")
    store.delete("s", "")
    assert not store.put(turn, "") and not store.listed("")
    store.put(Session("s"), "")
    assert not store.put(turn, ""), "it is another conversation of that name"
    assert store.required("s", "").messages == []


def test_a_turn_leaves_what_is_changed_meanwhile() -> None:
    """Fault: a conversation that is pinned while a turn is made is not pinned after it."""
    store = SessionStore(Limits(), None)
    store.put(Session("s"), "")
    turn = store.required("s", "")
    store.change("s", "", is_pinned=True, ttl_s=50.0)
    assert store.put(turn, "")
    found = store.required("s", "")
    assert (found.is_pinned, found.ttl_s, found.version) == (True, 50.0, 2)
    store.change("s", "", ttl_s=60.0)
    found = store.required("s", "")
    assert (found.is_pinned, found.ttl_s, found.version) == (True, 60.0, 2)
    ((_, seconds_left),) = store.listed("")
    assert 50 < seconds_left <= 60
    with pytest.raises(RefusedError, match="no session"):
        store.change("other", "", ttl_s=1.0)


def test_names_with_slashes(http: httpx.Client) -> None:
    """Fault: a conversation with a slash in its name can be made, but not deleted."""
    chat(http, [user("hi")], session_id="a/b")
    for name in ("a/b", "a%2Fb"):
        assert http.post(f"/admin/sessions/{name}", json={"ttl_s": 50}).json()["id"] == "a/b"
    assert http.delete("/admin/sessions/a/b").status_code == 200
    body = {"model": MODEL, "messages": [user("hi")], "session_id": "a/"}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "ends with a slash" in reply.text


def test_ttl_is_bounded(http: httpx.Client) -> None:
    chat(http, [user("hi")], session_id="s")
    for ttl_s in (0, 1e300, 86_401):
        reply = http.post("/admin/sessions/s", json={"ttl_s": ttl_s})
        assert reply.status_code == 400 and "session_s" in reply.text, reply.text


def test_pins_push_out_no_other_keys_sessions() -> None:
    """Fault: one key with pinned sessions leaves no room to the others."""
    store = SessionStore(Limits(max_sessions=4), None)
    store.put(Session("other"), "b")
    for name in "abcdef":
        store.put(Session(name), "a")
        store.change(name, "a", is_pinned=True)
    assert len(store.listed("b")) == 1 and len(store.listed("a")) == 3
