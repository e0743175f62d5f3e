"""Input of clients and people, taken as it was meant."""

from __future__ import annotations

import codecs
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from quire.base.errors import ConfigError
from quire.compute.sampling.sampler import not_finite
from quire.engine.model_front import ModelFront
from quire.entrypoints.cli.flags.fields import given_fields
from quire.entrypoints.cli.flags.server import add_server_flags, read_server_settings
from quire.entrypoints.cli.parser import CommandParser
from quire.protocol.status import EngineState, EngineStatus
from quire.protocol.step import REPORT_IT
from quire.server.generation.backend import Backend
from quire.server.http.server import uvicorn_config
from quire.server.http.tls import tls_context
from quire.server.processes.listening import listening
from quire.server.requests.errors import RefusedError
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.running import MODEL, RunningServer, running_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}


@pytest.fixture(scope="module")
def served(front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front, ServerSettings(root_path="/llm", disable_access_log=True)) as found:
        yield found


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with waiting.PatientClient(base_url=served.url.removesuffix("/llm")) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_tokens": 3.0}, {"max_tokens": 3}),
        ({"n": 2.0, "seed": 7.0, "top_k": 5.0}, {"n": 2, "seed": 7, "top_k": 5}),
        ({"stop_token_ids": [1, 2.0, 3]}, {"stop_token_ids": [1, 2, 3]}),
        ({"stream_options": None, "min_tokens": 1.0}, {"min_tokens": 1}),
        ({"top_p": 0}, {"temperature": 0}),
        ({"tools": []}, {}),
        ({"functions": [], "max_tokens": 2.0}, {"max_tokens": 2}),
        ({"user": "me", "max_tokens": 2.0}, {"max_tokens": 2}),
    ],
    ids=str,
)
def test_bodies_that_mean_the_same(
    http: httpx.Client, given: dict[str, Any], meant: dict[str, Any]
) -> None:
    texts = [
        [c["message"]["content"] for c in http.post(CHAT, json={**BODY, **each}).json()["choices"]]
        for each in (given, meant)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 2.5}, "max_tokens: expected int or null, got float"),
        ({"n": 1e300}, "n is "),
        ({"stop_token_ids": [1.0, 2.5]}, "stop_token_ids"),
        ({"max_tokens": 2.0, "n": "two"}, "n: expected int"),
    ],
    ids=str,
)
def test_what_is_no_integer_stays_refused(
    http: httpx.Client, given: dict[str, Any], words: str
) -> None:
    reply = http.post(CHAT, json={**BODY, **given})
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, BODY),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"model": MODEL, "messages": BODY["messages"], "max_tokens": 1}),
    ],
)
def test_a_byte_order_mark_is_passed_over(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    body = codecs.BOM_UTF8 + json.dumps(fields).encode()
    headers = {"content-type": "application/json"}
    reply = http.post(path, content=body, headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_slash_at_the_end_changes_nothing(http: httpx.Client, prefix: str, end: str) -> None:
    assert http.post(f"{prefix}{CHAT}{end}", json=BODY).status_code == 200
    assert http.get(f"{prefix}/v1/models{end}").status_code == 200
    assert http.get(f"{prefix}/health{end}").status_code == 200


def test_a_forgotten_version_is_named(http: httpx.Client) -> None:
    for path in ("/chat/completions", "/models"):
        reply = http.post(path, json=BODY)
        assert reply.status_code == 404
        assert f"Did you mean '/v1{path}'?" in reply.json()["error"]["message"]
    assert "See /docs" in http.get("/no/such/route").json()["error"]["message"]


def settings_of(*flags: str) -> ServerSettings:
    parser = CommandParser()
    add_server_flags(parser)
    return read_server_settings(parser.parse_args(flags))


def test_lists_may_be_json() -> None:
    both = "http://a.example", "https://b.example:8443"
    assert settings_of("--allowed-origins", *both).allowed_origins == both
    assert settings_of("--allowed-origins", json.dumps(both)).allowed_origins == both
    assert settings_of("--allowed-origins", '["*"]').allowed_origins == ("*",)
    assert settings_of("--allowed_hosts", '["me.example"]').allowed_hosts == ("me.example",)
    with pytest.raises(ConfigError, match="begins like a JSON list"):
        settings_of("--allowed-origins", '["*"')
    assert given_fields(CommandParser().parse_args([]), "server:") == {}


@pytest.mark.parametrize("origin", ["chat.example", "https://a.example/", "'*'", "", "http://"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origin"):
        ServerSettings(allowed_origins=(origin,))


def test_a_name_is_listened_to_at_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: clients that try ::1 first find nobody at localhost."""
    addresses = [("127.0.0.1", socket.AF_INET), ("127.0.0.2", socket.AF_INET)]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **_: [
            (family, socket.SOCK_STREAM, 6, "", (address, port)) for address, family in addresses
        ],
    )
    for count in (1, 2, 3):
        settings = ServerSettings(host="localhost", port=0, api_server_count=count)
        with listening(settings) as listeners:
            found = {each.getsockname()[0] for each in listeners}
            assert found == {"127.0.0.1", "127.0.0.2"}
            assert len({each.getsockname()[1] for each in listeners}) == 1
            assert len(listeners) == max(count, 2 if count == 1 else count)


def test_an_address_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a machine without IPv6 cannot listen at localhost."""
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*elsewhere, *here])
    with listening(ServerSettings(host="localhost", port=0)) as listeners:
        assert [each.getsockname()[0] for each in listeners] == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    with (
        pytest.raises(ConfigError, match="an address that this machine has"),
        listening(ServerSettings(host="localhost", port=0)),
    ):
        pass


def test_what_to_do_goes_by_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="Stop what listens there"), listening(settings):
            pass
    settings = ServerSettings(host="no-such-host.invalid", insecure_no_auth=True)
    with pytest.raises(ConfigError, match="a name or an address"), listening(settings):
        pass
    with pytest.raises(ConfigError, match="107 bytes"), listening(ServerSettings(uds="/x" * 99)):
        pass


@pytest.mark.parametrize("given", ["llm", "/llm", "llm/", "/llm/", "//llm//"])
def test_a_root_path_has_one_slash_in_front_and_none_behind(given: str) -> None:
    """Fault: the printed URLs were http://127.0.0.1:8000llm and …/llm//v1."""
    settings = ServerSettings(root_path=given)
    assert (settings.root_path, settings.url) == ("/llm", "http://127.0.0.1:8000/llm")
    assert ServerSettings(root_path="/").url == "http://127.0.0.1:8000"


def test_a_log_level_is_one_of_four() -> None:
    assert ServerSettings(log_level="warning").log_level == "warning"
    with pytest.raises(ConfigError, match=r"log_level is 'loud'.*debug, info, warning, error"):
        ServerSettings(log_level="loud")


@pytest.mark.parametrize("given", ["http://a/llm", "/a b", "/a?b=1", "/a/../b", "/a//b", "/ä"])
def test_what_is_no_root_path_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="root_path is"):
        ServerSettings(root_path=given)


def test_an_encrypted_key_needs_the_file_of_its_password(tmp_path: Path) -> None:
    """Fault: the start asked at the terminal, or hung without one."""
    key, cert, password = (tmp_path / name for name in ("key.pem", "cert.pem", "password"))
    made = ["-newkey", "rsa:2048", "-passout", "pass:secret", "-keyout", str(key), "-days", "2"]
    asked = ["openssl", "req", "-x509", *made, "-subj", "/CN=me", "-out", str(cert)]
    subprocess.run(asked, check=True, capture_output=True)
    files: dict[str, Any] = {"ssl_keyfile": str(key), "ssl_certfile": str(cert)}
    with pytest.raises(ConfigError, match=r"is encrypted.*ssl_keyfile_password_file"):
        tls_context(ServerSettings(**files))
    given = ServerSettings(**files, ssl_keyfile_password_file=str(password))
    with pytest.raises(ConfigError, match="cannot be read"):
        tls_context(given)
    password.write_text("wrong\n")
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(given)
    password.write_text("secret\n")
    assert tls_context(given) is not None
    assert uvicorn_config(Starlette(), given).ssl is not None  # uvicorn reads the files once more
    with pytest.raises(ConfigError, match="goes with ssl_keyfile"):
        ServerSettings(ssl_keyfile_password_file=str(password))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "has no body. Send a JSON object"),
        (b" \r\n", "has no body. Send a JSON object"),
        (codecs.BOM_UTF8, "has no body. Send a JSON object"),
        (b'{"prompt": "a', "it ends within a value, after 13 bytes"),
        (b'{"prompt": [1, 2', "it ends within a value, after 16 bytes"),
        (b'{"prompt": "a"} x', "is not valid JSON: JSON is malformed: trailing characters"),
    ],
)
def test_a_lost_body_is_not_called_truncated(http: httpx.Client, body: bytes, words: str) -> None:
    """Fault: "Input data was truncated" sends people to look for what cut it."""
    reply = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and words in message and "truncated" not in message


def test_an_offer_of_a_websocket_asks_for_no_library(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert http.get("/v1/realtime", headers=headers).status_code == 404
    assert http.get("/v1/models", headers=headers).status_code == 200
    assert "WebSocket" not in caplog.text and "pip install" not in caplog.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (EngineState.STARTING, "Try again soon"),
        (EngineState.SLEEPING, "POST /wake_up wakes it"),
        (EngineState.DRAINING, "when a server is back at this address"),
        (EngineState.DEAD, "has to be started again; its log says why"),
    ],
)
def test_what_helps_goes_by_the_state(
    state: EngineState, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: "Try again soon" where nothing will be there soon."""
    status = EngineStatus(state, message="so it is")
    monkeypatch.setattr(Backend, "status", property(lambda _: status))
    with pytest.raises(RefusedError, match=words):
        Backend().require()


def test_a_fault_of_the_model_is_not_to_be_sent_again() -> None:
    for message in (not_finite(3), REPORT_IT):
        assert "again" not in message
    assert "An equal request gives the same" in not_finite(3)


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (CHAT, {"n_predict": 5}, "Did you mean 'max_tokens'?"),
        (TEXT, {"num_predict": 5}, "Did you mean 'max_tokens'?"),
        (CHAT, {"repeat_penalty": 1.1}, "Did you mean 'repetition_penalty'?"),
        (TEXT, {"stop_sequences": ["a"]}, "Did you mean 'stop'?"),
        (CHAT, {"mirostat": 2}, "There is no field 'mirostat'. Leave it out."),
        (CHAT, {"functions": [{"name": "f"}]}, '"function": …}.'),
        (TEXT, {"tools": [{}]}, "send messages and tools to /v1/chat/completions."),
        (CHAT, {"web_search_options": {}}, "but the server searches nothing. Leave it out."),
    ],
)
def test_a_hint_says_one_thing_that_helps(
    http: httpx.Client, path: str, field: dict[str, Any], words: str
) -> None:
    """Fault: n_predict was "Did you mean 'prediction'?", and tools were to be sent and left out."""
    body = {CHAT: BODY, TEXT: {"prompt": "a"}}[path]
    reply = http.post(path, json={"model": MODEL, **body, **field})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(words)


@pytest.mark.parametrize(("method", "path"), [("POST", "/sleep"), ("GET", "/is_paused")])
def test_a_closed_route_says_what_opens_it(http: httpx.Client, method: str, path: str) -> None:
    reply = http.request(method, path)
    assert reply.status_code == 404
    assert "--enable-engine-control" in reply.json()["error"]["message"]
    other = http.post("/sleepy").json()["error"]["message"]
    assert "--enable-engine-control" not in other
