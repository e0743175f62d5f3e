"""A server as a client sees it, and what it is told when something is wrong."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.entrypoints.client import RemoteServer, ServerAddress
from tests.client.scripted_server import Script, serve_script
from tests.waiting import WAIT_S

BODY = {"prompt": "a"}


def remote(url: str, api_key: str | None = None) -> RemoteServer:
    return RemoteServer(ServerAddress.parse(url), api_key)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("localhost:9", "http://localhost:9"),
        ("https://models.example/llm/v1/", "https://models.example:443/llm"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_as_people_write_them(given: str, expected: str) -> None:
    """OpenAI clients want `/v1` at the end, people leave out `http://`."""
    assert str(ServerAddress.parse(given)) == expected


@pytest.mark.parametrize("given", ["", "ftp://here", "http://", "http://h:port", "http://h:99999"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        ServerAddress.parse(given)


def test_events_of_a_stream_until_its_end() -> None:
    """Comments and [DONE] are no events."""
    with serve_script(Script(words=("a", "b"))) as url:
        events = list(remote(url).stream("/v1/completions", BODY))
    assert [event["choices"][0]["text"] for event in events[:2]] == ["a", "b"]
    assert events[2]["usage"]["completion_tokens"] == 2
    assert len(events) == 3


@pytest.mark.parametrize(
    ("fail", "kind", "sentence"),
    [
        ("refuse", RequestError, "answers 400: temperature is 9.0"),
        ("error", EngineError, "broke off: the engine was restarted"),
        ("cut", EngineError, "cut its answer off"),
        ("reset", EngineError, "was lost|cut its answer off"),
    ],
)
def test_every_way_to_end_badly_is_told(fail: str, kind: type[Exception], sentence: str) -> None:
    """Half an answer must not look like a whole one."""
    with serve_script(Script(fail=fail)) as url, pytest.raises(kind, match=sentence):
        list(remote(url).stream("/v1/completions", BODY))


def test_leaving_a_stream_closes_the_connection() -> None:
    """Otherwise the server computes for nobody."""
    script = Script(words=["word " * 100] * 2000, gap_s=0.001)
    with serve_script(script) as url:
        events = remote(url).stream("/v1/completions", BODY)
        next(events)
        events.close()
        assert script.closed_early.wait(WAIT_S)


def test_a_key_is_sent_and_its_lack_is_told() -> None:
    with serve_script(Script(api_key="k" * 16)) as url:
        assert remote(url, "k" * 16).models()[0]["id"] == "tiny"
        with pytest.raises(RequestError, match=r"401.*--api-key or QUIRE_API_KEY"):
            remote(url).models()


def test_a_server_that_starts_is_waited_for() -> None:
    """The port opens before the model is loaded."""
    told: list[str] = []
    with serve_script(Script(starting=2)) as url:
        assert len(remote(url).wait_for_models(told.append)) == 2
    assert len(told) == 1
    assert "The engine is starting (loading)." in told[0]


def test_no_server() -> None:
    server = remote("http://127.0.0.1:9")
    assert not server.is_there()
    with pytest.raises(EngineError, match=r"No server answers at .*:9 .*quire serve"):
        server.models()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 with its key, which nobody signed."""
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    made = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(file), "-days", "2", "-subj", "/CN=me"]
    asked = ["openssl", "req", "-x509", *made, "-addext", "subjectAltName=IP:127.0.0.1"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    file.write_text(file.read_text() + done.stdout)
    return file


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_is_not_trusted_is_named_as_such(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: "No server answers" sends people to start another one."""
    with serve_script(Script(), tls) as url:
        with pytest.raises(EngineError, match=r"certificate of the server.*SSL_CERT_FILE"):
            remote(url).models()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert remote(url).models()[0]["id"] == "tiny"
        by_name = url.replace("127.0.0.1", "localhost")
        with pytest.raises(EngineError, match=r"not trusted \(Hostname mismatch"):
            remote(by_name).models()


def test_a_wrong_scheme_is_named_as_such(tls: ssl.SSLContext) -> None:
    with (
        serve_script(Script(), tls) as url,
        pytest.raises(EngineError, match="speaks TLS: give its address with https://"),
    ):
        remote(url.replace("https", "http")).models()
    with (
        serve_script(Script()) as url,
        pytest.raises(EngineError, match=r"speaks no TLS.*give its address with http://"),
    ):
        remote(url.replace("http", "https")).models()
