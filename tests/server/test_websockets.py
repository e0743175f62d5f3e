"""WebSockets as RFC 6455 has them, on the one route that has any."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.engine.model_front import ModelFront
from quire.server.http.websocket import FrameReader
from quire.server.settings import ServerSettings
from tests.server.running import MODEL, RunningServer, running_server
from tests.server.socket_client import SocketClient, masked

KEY = "k" * 32
SMALL: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "store": False}


def test_an_offer_is_taken(server: RunningServer) -> None:
    """The proof is that of section 1.3."""
    with SocketClient(server.port) as client:
        assert client.status == 101
        lines = {line.lower() for line in client.head}
        assert "sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=" in lines
        assert not [line for line in lines if line.startswith(("transfer-encoding", "content-"))]
        assert client.turn(**SMALL)[-1]["type"] == "response.incomplete"
        client.send(masked(9, b"there?"))
        assert client.frame() == (10, b"there?")
        client.send(masked(8, (1000).to_bytes(2)))
        assert client.closing_code() == 1000
    server.wait_until_idle()


def test_messages_come_in_any_pieces(server: RunningServer) -> None:
    """In frames with a ping between them, byte by byte, and longer than 65,535 bytes."""
    long = json.dumps({"type": "response.create", **SMALL, "metadata": {"a": "é" * 9}}).encode()
    parts = masked(1, long[:10], first_bits=0), masked(9, b""), masked(0, long[10:])
    with SocketClient(server.port) as client:
        client.send(b"".join(parts))
        assert client.frame() == (10, b"")
        assert json.loads(client.frame()[1])["type"] == "response.created"
    reader, found = FrameReader(2**20), []
    for byte in masked(1, b"x" * 70_000) + masked(1, b"y" * 300) + masked(2, b""):
        found += reader.feed(bytes([byte]))
    assert found == [(1, b"x" * 70_000), (1, b"y" * 300), (2, b"")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02hi", 1002),
        (masked(1, b"{}", first_bits=0xC0), 1002),
        (masked(3, b""), 1002),
        (masked(0, b"no beginning"), 1002),
        (masked(1, b"a", first_bits=0) + masked(1, b"b"), 1002),
        (masked(9, b"", first_bits=0), 1002),
        (masked(9, b"x" * 126), 1002),
        (masked(2, b"{}"), 1003),
        (masked(1, b"\xff"), 1007),
        (b"\x81\xff" + (2**40).to_bytes(8) + b"mask", 1009),
    ],
    ids=[
        "unmasked", "reserved bits", "opcode", "no beginning", "no end", "cut ping", "long ping",
        "bytes", "no text", "too long",
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_ends_the_connection(
    server: RunningServer, data: bytes, code: int
) -> None:
    with SocketClient(server.port) as client:
        client.send(data)
        assert client.closing_code() == code


def test_messages_that_ask_for_nothing_are_refused(server: RunningServer) -> None:
    """And the connection goes on."""
    with SocketClient(server.port) as client:
        for message in (b"{", b"[]", b"{}", b'{"type": "response.steer"}'):
            client.send(masked(1, message))
            error = json.loads(client.frame()[1])
            assert error["type"] == "error" and "response.create" in error["error"]["message"]
        (error,) = client.turn(**{**SMALL, "temperature": -1})
        assert error["status"] == 400 and error["error"]["param"] == "temperature"
        (error,) = client.turn(**SMALL, background=True)
        assert error["error"]["param"] == "background"
        assert client.turn(**SMALL)[-1]["type"] == "response.incomplete"


def test_outputs_of_hosted_tools_are_skipped(server: RunningServer) -> None:
    """The rule is that of POST: their calls were not the model's."""
    told = {"type": "message", "role": "user", "content": "hi"}
    with SocketClient(server.port) as client:
        for kind in ("computer_call_output", "local_shell_call_output"):
            hosted = {"type": kind, "call_id": "call_elsewhere", "output": "none"}
            events = client.turn(**{**SMALL, "input": [told, hosted]})
            assert events[-1]["type"] == "response.incomplete"
        for kind in ("function_call_output", "custom_tool_call_output"):
            output = {"type": kind, "call_id": "call_missing", "output": "none"}
            (error,) = client.turn(**{**SMALL, "input": [told, output]})
            assert error["status"] == 400 and "call_missing" in error["error"]["message"]


def test_a_client_that_leaves_ends_its_response(server: RunningServer) -> None:
    """Fault: the engine computes for nobody."""
    with SocketClient(server.port) as client:
        client.say({"type": "response.create", **SMALL, "max_output_tokens": 300})
        assert json.loads(client.frame()[1])["type"] == "response.created"
    server.wait_until_idle()


def test_who_may_open_one(front: ModelFront, http: httpx.Client) -> None:
    """Fault: a web page speaks to a server on its reader's machine, which nothing but the server
    itself prevents for WebSockets."""
    reply = http.get("/v1/responses")
    assert reply.status_code == 400 and "WebSockets" in reply.json()["error"]["message"]
    allowed = "http://localhost:3000"
    settings = ServerSettings(disable_access_log=True, api_key=(KEY,), allowed_origins=(allowed,))
    with running_server(front, settings) as server:
        key = f"Authorization: Bearer {KEY}"
        for lines, status in (
            ((), 401),
            ((key,), 101),
            ((key, f"Origin: {allowed}"), 101),
            ((key, "Origin: http://localhost"), 101),  # as clients that are no browsers send it
            ((key, "Origin: http://localhost:1"), 403),
            ((key, "Origin: null"), 403),
            ((key, "Origin: https://elsewhere.example"), 403),
        ):
            with SocketClient(server.port, *lines) as client:
                assert client.status == status
        with SocketClient(server.port, key) as client:
            assert client.turn(**SMALL)[-1]["type"] == "response.incomplete"
            added = server.call(lambda: list(server.client.added))
            assert added[-1].scheduling.tenant and not added[-1].scheduling.is_spare


def test_a_server_that_ends_leaves_nobody_waiting(front: ModelFront) -> None:
    with running_server(front) as server:
        client = SocketClient(server.port)
        assert client.turn(**SMALL)[-1]["type"] == "response.incomplete"
    assert client.closing_code() == 1001
    client.__exit__(None, None, None)
