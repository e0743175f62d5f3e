"""Messages of HTTP/1.x (RFC 9110, 9112) that a server accepts, and those that it refuses."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator

import pytest

from quire.engine.model_front import ModelFront
from quire.server.http import protocol
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests.pairs import BY_PAIRS
from tests.server.running import RunningServer
from tests.server.wire import Connection, Wire, replies_of
from tests.waiting import WAIT_S, VirtualTime

TEXT = b"/v1/completions"
BODY = json.dumps({"prompt": "hi", "max_tokens": 2, "seed": 1}).encode()
STREAMED = json.dumps({"prompt": "hi", "max_tokens": 2, "seed": 1, "stream": True}).encode()
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n1;x=y\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 1, BODY[:-1], BODY[-1:])
KIND = b"content-type: application/json\r\n"
HOST = b"host: localhost\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


def post(
    extra: bytes = b"",
    body: bytes = BODY,
    *,
    target: bytes = TEXT,
    version: bytes = b"1.1",
    host: bytes = HOST,
) -> bytes:
    """A request; its length is stated unless `extra` speaks of the body's framing."""
    is_framed = b"content-length" in extra or b"transfer-encoding" in extra
    length = b"" if is_framed else b"content-length: %d\r\n" % len(body)
    head = b"POST %b HTTP/%b\r\n%b%b%b%b\r\n" % (target, version, host, KIND, extra, length)
    return head + body


def get(
    target: bytes, extra: bytes = HOST, version: bytes = b"1.1", method: bytes = b"GET"
) -> bytes:
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, extra)


def upgrade(*tokens: bytes) -> bytes:
    settings = (
        b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    return settings + b"".join(b"Upgrade: %b\r\n" % token for token in tokens)


Split = Callable[[bytes], list[bytes]]


def whole(data: bytes) -> list[bytes]:
    return [data]


def at_the_body(data: bytes) -> list[bytes]:
    head, separator, rest = data.partition(b"\r\n\r\n")
    return [head + separator, rest]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.fixture(scope="module")
def wire(front: ModelFront) -> Iterator[Wire]:
    found = Wire(
        front, ServerSettings(disable_access_log=True, limits=Limits(max_header_bytes=4096))
    )
    with found.runner:
        yield found


def statuses(found: Connection) -> list[int]:
    return [reply.status for reply in found.replies]


OFFERS = {
    "h2c": upgrade(b"h2c"),
    "websocket": b"connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n",
    "several": upgrade(b"h2c, websocket/13, IRC/6.9"),
    "several lines": upgrade(b"h2c", b"TLS/1.0"),
    "unknown": upgrade(b"no-such-protocol"),
    "several connections": b"connection: keep-alive\r\nconnection: upgrade\r\nupgrade: h2c\r\n",
}


@BY_PAIRS
@pytest.mark.parametrize("split", [whole, at_the_body, byte_by_byte])
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_offer_to_upgrade_is_ignored(
    wire: Wire, offer: bytes, framing: str, split: Split
) -> None:
    """RFC 9110, 7.8. Java's HttpClient makes one by default. What follows is read as ever."""
    request = post(offer) if framing == "length" else post(offer + CHUNKED, CHUNKS)
    found = wire.exchange(split(request + VERSION + get(b"/livez", HOST + offer) + request))
    assert statuses(found) == [200, 200, 200, 200]
    first, _, _, last = (json.loads(reply.body) for reply in found.replies)
    plain = json.loads(wire.exchange([post()]).replies[0].body)
    assert first["choices"] == last["choices"] == plain["choices"]
    assert b"upgrade" not in bytes(found.received).lower() and not found.is_closed


def test_an_offer_takes_nothing_from_the_request(wire: Wire) -> None:
    """Its id, its wish to close, what it expects, and its place in a row of requests."""
    offer = b"x-request-id: mine\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n"
    found = wire.exchange([VERSION + post(offer + b"expect: 100-continue\r\n") + VERSION])
    assert statuses(found) == [200, 100, 200] and found.is_closed
    assert found.replies[-1].headers[b"x-request-id"] == b"mine"
    stream = wire.exchange([post(upgrade(b"h2c"), STREAMED)])
    assert stream.replies[0].body.endswith(b"data: [DONE]\n\n")


FINE = {
    "plain": post(),
    "chunks": post(CHUNKED, CHUNKS),
    "chunks in capitals": post(b"transfer-encoding:\tCHUNKED\r\n", CHUNKS),
    "spaces around a length": post(b"content-length: \t %d \t\r\n" % len(BODY)),
    "lines before": b"\r\n\r\n" + post(),
    "line after": post() + b"\r\n",
    "absolute": post(target=b"http://localhost:8000" + TEXT),
    "absolute in capitals": post(target=b"HTTP://LOCALHOST" + TEXT + b"?a=b"),
    "absolute wins over Host": post(target=b"http://localhost" + TEXT, host=b"host: evil\r\n"),
    "another expectation": post(b"expect: wonders\r\n"),
    "empty Host": post(host=b"host:\r\n"),
    "Host with port": post(host=b"host: 127.0.0.1:1\r\n"),
    "other bytes": post(b"x-note: \xe4\xff\r\n"),
    "two lists": post(b"accept: a\r\naccept: b\r\n"),
}


@pytest.mark.parametrize("split", [whole, at_the_body, byte_by_byte])
@pytest.mark.parametrize("request_", FINE.values(), ids=FINE)
def test_what_must_be_accepted(wire: Wire, request_: bytes, split: Split) -> None:
    found = wire.exchange(split(request_ + request_))
    assert statuses(found) == [200, 200] and not found.is_closed


def length(value: bytes) -> bytes:
    return b"content-length: %b\r\n" % value


NUM = b"%d" % len(BODY)
REFUSED: dict[str, tuple[bytes, int]] = {
    # Framing (RFC 9112, 6) that two readers might understand differently.
    "two lengths": (post(length(NUM) + length(b"3")), 400),
    "same length twice": (post(length(NUM) + length(NUM)), 400),
    "list of lengths": (post(length(NUM + b", " + NUM)), 400),
    "signed length": (post(length(b"+" + NUM)), 400),
    "negative length": (post(length(b"-1")), 400),
    "hexadecimal length": (post(length(b"0x10")), 400),
    "length with a space": (post(length(b"1 2")), 400),
    "empty length": (post(length(b"")), 400),
    "endless length": (post(length(b"9" * 40)), 400),
    "length and chunks": (post(length(NUM) + CHUNKED, CHUNKS), 400),
    "chunks and length": (post(CHUNKED + length(b"5"), CHUNKS), 400),
    "chunked twice": (post(CHUNKED + CHUNKED, CHUNKS), 400),
    "chunked, chunked": (post(b"transfer-encoding: chunked, chunked\r\n", CHUNKS), 400),
    "chunked before another": (post(b"transfer-encoding: chunked, gzip\r\n", CHUNKS), 400),
    "no chunks": (post(b"transfer-encoding: gzip\r\n"), 400),
    "identity": (post(b"transfer-encoding: identity\r\n"), 400),
    "another name": (post(b"transfer-encoding: xchunked\r\n", CHUNKS), 400),
    "an unknown coding": (post(b"transfer-encoding: gzip, chunked\r\n", CHUNKS), 501),
    "chunks in HTTP/1.0": (post(CHUNKED, CHUNKS, version=b"1.0"), 400),
    "chunk of no number": (post(CHUNKED, b"zz\r\n"), 400),
    "negative chunk": (post(CHUNKED, b"-1\r\n"), 400),
    "endless chunk": (post(CHUNKED, b"f" * 20 + b"\r\n"), 400),
    "chunk over its size": (post(CHUNKED, b"2\r\nabcdef\r\n"), 400),
    "chunks with bare LF": (post(CHUNKED, CHUNKS.replace(b"\r\n", b"\n")), 400),
    # Fields (RFC 9112, 5).
    "folded line": (post(b"x: a\r\n b\r\n"), 400),
    "folded length": (post(b"content-length:\r\n " + NUM + b"\r\n"), 400),
    "line that begins with a space": (get(b"/version", b" " + HOST), 400),
    "space before the colon": (post(b"x : a\r\n"), 400),
    "no name": (post(b": a\r\n"), 400),
    "no colon": (post(b"abc\r\n"), 400),
    "bare LF": (get(b"/version").replace(b"\r\n", b"\n"), 400),
    "bare CR": (post(b"x: a\rb\r\n"), 400),
    "NUL": (post(b"x: a\0b\r\n"), 400),
    # Host and target (RFC 9112, 3).
    "no Host": (get(b"/version", b""), 400),
    "two Hosts": (get(b"/version", HOST + HOST), 400),
    "two different Hosts": (get(b"/version", HOST + b"host: other\r\n"), 400),
    "Host with a space": (get(b"/version", b"host: local host\r\n"), 400),
    "Host with a path": (get(b"/version", b"host: localhost/x\r\n"), 400),
    "Host with a user": (get(b"/version", b"host: me@localhost\r\n"), 400),
    "two Hosts in HTTP/1.0": (get(b"/version", HOST + HOST, b"1.0"), 400),
    "absolute without Host": (get(b"http://localhost/version", b""), 400),
    "absolute with a user": (get(b"http://me@localhost/version"), 400),
    "absolute of another scheme": (get(b"ftp://localhost/version"), 400),
    "no slash": (get(b"version"), 400),
    "space in the target": (get(b"/ver sion"), 400),
    "other bytes in the target": (get(b"/v\xc3\xa4"), 400),
    "authority": (get(b"localhost:80", method=b"CONNECT"), 501),
    # Versions and methods.
    "HTTP/0.9": (b"GET /version\r\n\r\n", 505),
    "HTTP/0.9 by name": (get(b"/version", version=b"0.9"), 505),
    "HTTP/1.2": (get(b"/version", version=b"1.2"), 400),
    "HTTP/2": (get(b"/version", version=b"2.0"), 505),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "method in small letters": (get(b"/version", method=b"get"), 400),
    "unknown method": (get(b"/version", method=b"BREW"), 400),
}  # fmt: skip


@pytest.mark.parametrize("split", [whole, at_the_body, byte_by_byte])
@pytest.mark.parametrize(("request_", "status"), REFUSED.values(), ids=REFUSED)
def test_what_must_be_refused(wire: Wire, request_: bytes, status: int, split: Split) -> None:
    """With one answer, and the end of the connection: nothing after it is trusted."""
    found = wire.exchange([*split(request_), VERSION])
    assert statuses(found) == [status] and found.is_closed
    assert found.replies[0].headers[b"connection"] == b"close"


@pytest.mark.parametrize(
    "target",
    [b"http://evil.example/version", b"http://evil.example:80/version", b"http://evil.example"],
)
def test_the_host_of_an_absolute_target_is_the_one_that_counts(wire: Wire, target: bytes) -> None:
    """RFC 9112, 3.2.2."""
    assert statuses(wire.exchange([get(target)])) == [403]


def test_an_absolute_target_without_a_path_is_the_root(wire: Wire) -> None:
    found = wire.exchange([get(b"http://localhost") + get(b"http://localhost?x=1") + VERSION])
    assert statuses(found) == [307, 307, 200]
    assert found.replies[0].headers[b"location"] == b"/ui"


@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize("host", [HOST, b""])
def test_http_1_0(wire: Wire, body: bytes, host: bytes) -> None:
    """No chunks, no 100, no need of a Host, and the end of the connection after the answer."""
    expects = b"expect: 100-continue\r\n"
    found = wire.exchange([post(expects, body, version=b"1.0", host=host) + VERSION])
    assert statuses(found) == [200] and found.is_closed
    reply = found.replies[0]
    assert reply.headers[b"connection"] == b"close" and b"transfer-encoding" not in reply.headers
    assert reply.is_open_ended == (body is STREAMED)
    if body is STREAMED:
        events = [line for line in reply.body.split(b"\n\n") if line]
        assert (
            all(event.startswith(b"data: ") for event in events) and events[-1] == b"data: [DONE]"
        )
    else:
        assert json.loads(reply.body)["choices"]


def test_http_1_0_keeps_a_connection_that_it_asks_to_keep(wire: Wire) -> None:
    """Unless only the end of the connection can end the answer."""
    asks = b"connection: keep-alive\r\n"
    kept = get(b"/version", HOST + asks, b"1.0")
    found = wire.exchange(
        [kept + post(asks, version=b"1.0") + get(b"/version", HOST, b"1.0") + kept]
    )
    assert statuses(found) == [200, 200, 200] and found.is_closed
    assert [r.headers[b"connection"] for r in found.replies] == [b"keep-alive"] * 2 + [b"close"]
    found = wire.exchange([post(asks, STREAMED, version=b"1.0") + kept])
    assert statuses(found) == [200] and found.replies[0].is_open_ended


def test_http_1_1_closes_when_it_is_asked_to(wire: Wire) -> None:
    for asks in (b"close", b"foo, Close", b"keep-alive\r\nconnection: close"):
        found = wire.exchange([post(b"connection: " + asks + b"\r\n") + VERSION])
        assert statuses(found) == [200] and found.is_closed
        assert found.replies[0].headers[b"connection"] == b"close"


def test_a_client_that_expects_100_gets_it_when_its_body_is_wanted(wire: Wire) -> None:
    request = post(b"Expect: 100-Continue\r\n")

    async def talk() -> Connection:
        connection = Connection(wire)
        connection.send(at_the_body(request)[0])
        await connection.wait(
            lambda: bytes(connection.received) == b"HTTP/1.1 100 Continue\r\n\r\n"
        )
        connection.send(BODY + VERSION)
        await connection.wait(lambda: not connection.state.tasks)
        connection.end()
        return connection

    found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
    assert [r.status for r in replies_of(bytes(found.received), False)] == [100, 200, 200]


@pytest.mark.parametrize(
    ("extra", "target", "status"),
    [(b"content-encoding: gzip\r\n", TEXT, 415), (b"", b"/nowhere", 404)],
)
def test_a_body_that_was_not_asked_for_may_never_come(
    wire: Wire, extra: bytes, target: bytes, status: int
) -> None:
    """So the connection ends: its next bytes could be that body, or another request."""
    request = post(b"expect: 100-continue\r\n" + extra, target=target)
    found = wire.exchange([at_the_body(request)[0], VERSION])
    assert statuses(found) == [status] and found.is_closed
    assert found.replies[0].headers[b"connection"] == b"close"
    complete = wire.exchange([request + VERSION])  # it came unasked
    assert statuses(complete) == [status, 200] and not complete.is_closed


@BY_PAIRS
@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize(
    "rest",
    [b"garbage garbage\r\n\r\n", b'"}', get(b"/version", b" x\r\n"), b"\0"],
    ids=lambda rest: repr(rest[:20]),
)
@pytest.mark.parametrize("split", [whole, at_the_body, byte_by_byte])
def test_garbage_does_not_cut_the_answer_before_it(
    wire: Wire, body: bytes, rest: bytes, split: Split
) -> None:
    """A body that is longer than stated, for example: one answer, whole, and the end."""
    wire.client.paused = True

    async def talk() -> Connection:
        connection = Connection(wire)
        for segment in split(post(body=body) + rest):
            connection.send(segment)
        await connection.wait(lambda: wire.client.num_unfinished == 1)
        wire.client.paused = False
        await connection.wait(lambda: not connection.state.tasks)
        connection.end()
        return connection

    found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
    replies = replies_of(bytes(found.received), found.is_closed)
    assert [reply.status for reply in replies] == [200] and found.is_closed
    assert (b"[DONE]" in replies[0].body) == (body is STREAMED)


@pytest.mark.parametrize("body", [BODY, STREAMED])
def test_a_head_without_an_end_does_not_cut_the_answer_before_it(wire: Wire, body: bytes) -> None:
    found = wire.exchange([post(body=body), b"GET /", b"a" * 9000, b"a" * 9000, VERSION])
    assert statuses(found) == [200] and found.is_closed
    assert (b"[DONE]" in found.replies[0].body) == (body is STREAMED)


def test_a_broken_body_in_a_row_of_requests_is_refused_in_its_turn(wire: Wire) -> None:
    found = wire.exchange([post() + post(CHUNKED, b"zz\r\n") + VERSION])
    assert statuses(found) == [200, 400] and found.is_closed


def test_a_body_that_breaks_is_not_asked_for(wire: Wire) -> None:
    """Fault: `100 Continue` follows the last answer."""
    found = wire.exchange([post(b"expect: 100-continue\r\n" + CHUNKED, b"zz\r\n")])
    assert statuses(found) == [400] and found.is_closed


def test_a_client_is_heard_out_in_bounded_time(
    front: ModelFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last answer: while it speaks, and no longer than a body may take."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)

    async def talk(wire: Wire, *, speaks: bool) -> float:
        connection, loop = Connection(wire), asyncio.get_running_loop()
        monkeypatch.setattr(connection, "can_write_eof", lambda: False)  # as over TLS
        started = loop.time()
        connection.send(post(b"connection: close\r\n", target=b"/nowhere")[:-20])
        await connection.wait(lambda: not connection.state.tasks)
        while not connection.is_closed:
            connection.send(b"x" if speaks else b"")
            await asyncio.sleep(0.05)
        assert [r.status for r in replies_of(bytes(connection.received), True)] == [404]
        return loop.time() - started

    for timeout_s, speaks in ((0.5, True), (2 * WAIT_S, False)):
        limits = Limits(body_timeout_s=timeout_s)
        wire = Wire(front, ServerSettings(disable_access_log=True, limits=limits), VirtualTime)
        with wire.runner:
            took_s = wire.runner.run(asyncio.wait_for(talk(wire, speaks=speaks), WAIT_S))
            assert (took_s >= timeout_s) == speaks


def test_a_body_that_breaks_after_its_answer_gets_no_second_one(wire: Wire) -> None:
    async def talk() -> Connection:
        connection = Connection(wire)
        connection.send(post(CHUNKED, b"5\r\nhello\r\n", target=b"/nowhere"))
        await connection.wait(lambda: not connection.state.tasks)
        connection.send(b"zz\r\n")
        await connection.wait(lambda: connection.is_closed)
        return connection

    found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
    assert [r.status for r in replies_of(bytes(found.received), True)] == [404]


def test_trailers_change_no_header(wire: Wire) -> None:
    trailers = CHUNKS[:-2] + b"x-request-id: late\r\nhost: evil\r\n\r\n"
    found = wire.exchange(
        byte_by_byte(post(b"x-request-id: early\r\n" + CHUNKED, trailers) + VERSION)
    )
    assert statuses(found) == [200, 200]
    assert found.replies[0].headers[b"x-request-id"] == b"early"


@pytest.mark.parametrize(
    "endless", [b"0\r\nx: ", b"0\r\n", b"1;x="], ids=["value", "lines", "extension"]
)
def test_what_frames_a_body_has_a_bound(wire: Wire, endless: bytes) -> None:
    """Fault: trailers and chunk extensions count as neither header nor body."""
    line = b"x: y\r\n" if endless == b"0\r\n" else b"a" * 6
    found = wire.exchange([post(CHUNKED, endless), *[line * 50] * 100])
    assert statuses(found) == [431] and found.is_closed


def test_small_chunks_are_not_framing_alone(wire: Wire) -> None:
    chunks = b"".join(b"1;x=%b\r\n%c\r\n" % (b"y" * 90, byte) for byte in BODY) + b"0\r\n\r\n"
    assert len(chunks) > 4096
    assert statuses(wire.exchange(byte_by_byte(post(CHUNKED, chunks)))) == [200]


def test_every_get_has_its_head(wire: Wire) -> None:
    """RFC 9110, 9.1."""
    for path in b"/version /v1/models /livez /health /readyz /metrics /load".split():
        [head] = wire.exchange([get(path, method=b"HEAD")], ["HEAD"]).replies
        [full] = wire.exchange([get(path)]).replies
        assert head.status == full.status == 200, path
        assert head.headers[b"content-type"] == full.headers[b"content-type"]
        assert b"content-length" in head.headers


def test_405_says_what_is_allowed(wire: Wire) -> None:
    """RFC 9110, 15.5.6."""
    cases = (
        (get(TEXT), b"POST"),
        (post(target=b"/version"), b"GET, HEAD"),
        (get(b"/admin/prefixes", method=b"PUT"), b"GET, HEAD, POST"),
        (get(b"/admin/prefixes/x"), b"DELETE"),
    )
    for request, allowed in cases:
        found = wire.exchange([request])
        assert statuses(found) == [405]
        assert found.replies[0].headers[b"allow"] == allowed


def test_empty_lines_hold_no_connection(front: ModelFront) -> None:
    """Fault: they end the wait for the next request, and begin none."""
    limits = Limits(keep_alive_timeout_s=1.0, header_timeout_s=0.5)
    wire = Wire(front, ServerSettings(disable_access_log=True, limits=limits), VirtualTime)

    async def talk() -> Connection:
        connection = Connection(wire)
        connection.send(VERSION)
        await connection.wait(lambda: not connection.state.tasks)
        while not connection.is_closed:
            connection.send(b"\r\n")
            await asyncio.sleep(0.1)
        return connection

    with wire.runner:
        found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
    assert [r.status for r in replies_of(bytes(found.received), True)] == [200]


def test_the_wait_for_a_request_ends_where_it_begins(front: ModelFront) -> None:
    """Also if the request before it ends meanwhile, or has a body that nobody has read."""
    limits = Limits(keep_alive_timeout_s=1.0)
    wire = Wire(front, ServerSettings(disable_access_log=True, limits=limits), VirtualTime)

    async def talk(first: bytes, last: bytes) -> Connection:
        connection = Connection(wire)
        connection.send(first)
        await connection.wait(lambda: not connection.state.tasks)
        await asyncio.sleep(1.2)
        connection.send(last)
        await connection.wait(lambda: not connection.state.tasks)
        connection.end()
        return connection

    with wire.runner:
        for first, last in (
            (VERSION + VERSION[:9], VERSION[9:]),
            (post(target=b"/nowhere")[:-1], b"}" + VERSION),
        ):
            found = wire.runner.run(asyncio.wait_for(talk(first, last), WAIT_S))
            replies = replies_of(bytes(found.received), False)
            assert len(replies) == 2 and replies[1].status == 200


def test_a_client_that_reads_steadily_gets_all(front: ModelFront) -> None:
    """Fault: it is cut off when a large answer takes longer than a client may take nothing."""
    limits = Limits(stalled_write_timeout_s=0.05)
    brisk = Wire(front, ServerSettings(disable_access_log=True, limits=limits), VirtualTime)

    async def talk() -> list[int]:
        connection, looks = Connection(brisk), list[int]()

        def less_each_time() -> int:
            looks.append(max(100_000 - 10_000 * len(looks), 50_000))
            return looks[-1]

        connection.num_unsent = less_each_time
        connection.protocol.pause_writing()
        await connection.wait(lambda: connection.is_closed)
        return looks

    with brisk.runner:
        assert brisk.runner.run(asyncio.wait_for(talk(), WAIT_S)) == [
            100_000, 90_000, 80_000, 70_000, 60_000, 50_000, 50_000,
        ]  # fmt: skip


@pytest.mark.parametrize("body", [BODY, STREAMED])
@pytest.mark.parametrize("is_early", [True, False])
def test_who_leaves_leaves_all_of_its_requests(wire: Wire, body: bytes, is_early: bool) -> None:
    """Fault: only the last request of a row hears of it, and the engine computes for nobody."""
    wire.client.paused = True

    async def talk() -> Connection:
        connection = Connection(wire)
        connection.send(post(body=body) + (VERSION + VERSION if is_early else b""))
        await connection.wait(lambda: wire.client.num_unfinished == 1)
        if not is_early:
            connection.send(VERSION + VERSION)
        assert not connection.protocol.flow.read_paused  # an end would not be heard
        connection.end()
        await connection.wait(lambda: not connection.state.tasks)
        return connection

    try:
        found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
        assert not wire.client.num_unfinished and b"/version" not in bytes(found.received)
    finally:
        wire.client.paused = False


def test_few_bytes_may_wait(wire: Wire) -> None:
    """Behind a request that is being answered; all are answered in the end."""
    wire.client.paused = True
    padded = get(b"/version", HOST + b"x-note: " + b"y" * 2000 + b"\r\n")

    async def talk() -> Connection:
        connection = Connection(wire)
        connection.send(post())
        await connection.wait(lambda: wire.client.num_unfinished == 1)
        num_sent = 0
        while not connection.protocol.flow.read_paused:
            connection.send(padded)
            num_sent += len(padded)
        assert 2**15 < num_sent < 2**17
        wire.client.paused = False
        await connection.wait(lambda: not connection.state.tasks)
        assert not connection.protocol.flow.read_paused
        connection.end()
        return connection

    found = wire.runner.run(asyncio.wait_for(talk(), WAIT_S))
    assert len(replies_of(bytes(found.received), False)) > 2**15 // len(padded)


@pytest.mark.parametrize("size", [300_000, 9_000_000])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_an_answer_outlives_the_body_that_it_does_not_wait_for(
    server: RunningServer, size: int, version: bytes
) -> None:
    """Fault: a connection that is closed with unread bytes is reset, and the answer is lost."""
    extra = b"connection: close\r\ncontent-length: %d\r\n" % size
    head = post(extra, b"", target=b"/nowhere", version=version)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            connection.sendall(head)
            for _ in range(size // 100_000):
                connection.sendall(b" " * 100_000)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert [reply.status for reply in replies_of(received, True)] == [404]


def test_over_a_socket(server: RunningServer) -> None:
    """It is the same protocol that serves there: an offer to upgrade, in two segments."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for segment in at_the_body(post(upgrade(b"h2c") + b"connection: close\r\n")):
            connection.sendall(segment)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert [reply.status for reply in replies_of(received, True)] == [200]
