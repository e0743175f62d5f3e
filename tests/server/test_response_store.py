"""Responses that are kept: bounded by number, bytes and age, per key, and common to all fronts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.server.generation.sealed import seal, unseal
from quire.server.requests.errors import ErrorReply, RefusedError
from quire.server.requests.limits import Limits
from quire.server.responses.references import with_referenced
from quire.server.responses.store import ResponseStore, StoredResponse

Open = Callable[..., ResponseStore]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_store(clock: Clock) -> Iterator[Open]:
    opened: list[ResponseStore] = []

    def make(path: Path | None = None, **limits: Any) -> ResponseStore:
        opened.append(ResponseStore(Limits(**limits), path, clock))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def response(name: str, previous: str | None = None, **others: Any) -> StoredResponse:
    body = {"id": name, "status": "completed", "output": [{"type": "message", "id": name}]}
    return StoredResponse(name, previous, body | others, [{"type": "message", "id": f"in-{name}"}])


def has(store: ResponseStore, name: str) -> bool:
    try:
        return store.find(name, "").id == name
    except RefusedError as error:
        assert error.status == 404
        return False


def test_what_was_used_least_recently_goes_first(open_store: Open, clock: Clock) -> None:
    store = open_store(max_stored_responses=2)
    for name in ("a", "b"):
        store.put(response(name), "")
        clock.now += 1
    assert has(store, "a")
    store.put(response("c"), "")
    assert [has(store, name) for name in "abc"] == [True, False, True]
    assert store.num_kept == 2


def test_bytes_are_bounded(open_store: Open) -> None:
    store = open_store(max_stored_bytes=4000)
    for number in range(20):
        store.put(response(str(number), text="x" * 1000), "")
        assert store.num_bytes <= 4000
    assert has(store, "19") and not has(store, "0")


def test_age_is_bounded(open_store: Open, clock: Clock) -> None:
    store = open_store(stored_response_s=10.0)
    store.put(response("a"), "")
    clock.now += 9
    assert has(store, "a")
    clock.now += 9
    assert has(store, "a")
    clock.now += 11
    assert not has(store, "a")


def test_keys_see_their_own(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"), "one")
    for use in (store.find, store.delete, store.conversation):
        with pytest.raises(RefusedError, match="There is no response"):
            use("a", "two")
    assert store.find("a", "one").id == "a"


def test_a_conversation_is_all_of_its_turns(open_store: Open) -> None:
    store = open_store()
    store.put(response("a"), "")
    store.put(response("b", "a"), "")
    store.put(response("c", "b"), "")
    items, last = store.conversation("c", "")
    assert [item["id"] for item in items] == ["in-a", "a", "in-b", "b", "in-c", "c"]
    assert last.id == "c"
    store.delete("a", "")
    with pytest.raises(RefusedError, match="There is no response 'a'"):
        store.conversation("c", "")


def test_references_stay_within_what_a_request_may_bring(open_store: Open) -> None:
    """Fault: a short request has the server read all that it keeps; keys read each other's."""
    store, limits = open_store(), Limits(max_body_bytes=150)
    for number in range(3):
        output = [{"type": "message", "id": f"msg_{number}_0"}]
        store.put(response(f"resp_{number}", output=output), "a")

    def found(*names: str, tenant: str = "a") -> list[object]:
        items = [{"type": "item_reference", "id": name} for name in names]
        referred = with_referenced(items, lambda each: store.output(each, tenant), limits)
        return [item["id"] for item in referred]

    assert found("msg_1_0", "msg_0_0") == ["msg_1_0", "msg_0_0"]
    with pytest.raises(RefusedError, match="max_body_bytes"):
        found("msg_0_0", "msg_1_0", "msg_2_0")
    for names, tenant in ((["msg_0_0"], "b"), (["msg_0_0"] * 2, "a"), (["msg_0_1"], "a")):
        with pytest.raises(RefusedError, match="There is no item"):
            found(*names, tenant=tenant)


def test_fronts_share_a_file(open_store: Open, tmp_path: Path) -> None:
    """A response that one front makes is read, and cancelled, by another one."""
    one, other = (open_store(tmp_path / "responses.sqlite") for _ in range(2))
    one.put(response("a", status="in_progress"), "")
    assert other.is_wanted("a") and other.find("a", "").is_unfinished
    other.put(response("a", status="cancelled"), "")
    assert not one.is_wanted("a")
    other.delete("a", "")
    assert one.num_kept == 0


def test_a_caller_makes_room_for_itself(open_store: Open, clock: Clock) -> None:
    """Fault: a caller that keeps many drives out the conversations of all others."""
    store = open_store(max_stored_bytes=10_000)
    store.put(response("mine"), "light")
    for number in range(40):
        clock.now += 1
        store.put(response(f"{number}", text="x" * 1000), "heavy")
    assert store.find("mine", "light") and store.find("39", "heavy")
    store = open_store(max_stored_responses=3)
    store.put(response("large", text="x" * 9000), "light")
    for number in range(9):
        clock.now += 1
        store.put(response(f"{number}"), "heavy")
    assert store.find("large", "light") and store.find("8", "heavy")


def test_what_is_being_made_stays_longest(open_store: Open, clock: Clock) -> None:
    store = open_store(max_stored_responses=2)
    store.put(response("a", status="queued"), "")
    for name in "bcd":
        clock.now += 1
        store.put(response(name), "")
    assert [has(store, name) for name in "abcd"] == [True, False, False, True]


def test_a_front_that_ended_leaves_nothing_queued(open_store: Open, clock: Clock) -> None:
    store = open_store()
    store.put(response("a", status="in_progress"), "")
    for _ in range(4):
        clock.now += 20
        assert store.is_wanted("a")
    assert store.find("a", "").is_unfinished
    clock.now += 31
    found = store.find("a", "")
    assert found.body["status"] == "failed" and "has ended" in found.body["error"]["message"]


def test_a_conversation_is_no_longer_than_a_request(open_store: Open) -> None:
    store = open_store(max_body_bytes=1000)
    for number in range(40):
        previous = str(number - 1) if number else None
        store.put(response(str(number), previous, tools=["x" * 2000]), "")
    assert len(store.conversation("5", "")[0]) == 12
    with pytest.raises(RefusedError, match="max_body_bytes") as found:
        store.conversation("39", "")
    assert found.value.status == 400


def test_earlier_turns_count_as_used(open_store: Open, clock: Clock) -> None:
    store = open_store(stored_response_s=10.0)
    store.put(response("a"), "")
    store.put(response("b", "a"), "")
    for _ in range(3):
        clock.now += 8
        assert len(store.conversation("b", "")[0]) == 4
    store.put(response("c", "b"), "other")
    with pytest.raises(RefusedError, match="There is no response 'b'"):
        store.conversation("c", "other")


def test_fronts_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Fault: "database is locked" ends a front at its start."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(10):
            path, together = tmp_path / f"{number}.sqlite", threading.Barrier(8)

            def start(path: Path = path, together: threading.Barrier = together) -> None:
                together.wait()
                ResponseStore(Limits(), path).close()

            for each in [pool.submit(start) for _ in range(8)]:
                each.result()


def test_token_ids_come_back(open_store: Open) -> None:
    store = open_store()
    kept = response("a")
    kept.token_ids = [1, 2, 300_000]
    store.put(kept, "")
    assert store.find("a", "") == kept


@pytest.mark.parametrize("text", ["", "a thought", "\u2028 é 🙂\n" * 50])
def test_seals_are_read_again(text: str) -> None:
    assert seal(text) and unseal(seal(text)) == text
    assert seal(text).isascii()


@pytest.mark.parametrize("path", ["/v1/messages", "/root/v1/messages/count_tokens"])
def test_errors_of_messages_have_their_shape(path: str) -> None:
    reply = ErrorReply(503, "busy", retry_after_s=3.0).at(path, "r1")
    assert reply.status == 529 and "retry-after" in reply.headers
    assert reply.body == (
        b'{"type":"error","error":{"type":"overloaded_error","message":"busy"},"request_id":"r1"}'
    )
    assert ErrorReply(503, "busy").at("/v1/messages2").status == 503
