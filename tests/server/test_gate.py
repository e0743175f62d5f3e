"""Keys, hosts and headers, which guard every route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.responses import Response

from quire.base.errors import ConfigError
from quire.engine.model_front import ModelFront
from quire.server.http.gate import Gate
from quire.server.readings.short_status import PROBES
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.running import RunningServer, running_server

KEYS = ("first-key-0123456789", "second-key-0123456789")
BODY = {"prompt": "The same long prompt for everybody. " * 4, "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(front: ModelFront) -> Iterator[RunningServer]:
    settings = ServerSettings(
        api_key=KEYS,
        api_key_weights=(1.0, 2.5),
        disable_access_log=True,
        limits=Limits(max_requests_per_key=2, max_header_bytes=4096),
    )
    with running_server(front, settings) as found:
        yield found


def routes(server: RunningServer) -> list[str]:
    document = waiting.get(f"{server.url}/openapi.json", headers={"x-api-key": KEYS[0]}).json()
    return [
        path.replace("{model_id}", "x").replace("{request_id}", "x") for path in document["paths"]
    ]


def test_every_route_wants_a_key_but_the_probes(guarded: RunningServer) -> None:
    paths = [*routes(guarded), "/docs", "/openapi.json", "/no-such", f"{guarded.url}//livez"]
    assert "/metrics" in paths and "/tokenize" in paths
    with waiting.PatientClient(base_url=guarded.url) as http:
        for path in paths:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = http.request(method, path)
                if path in PROBES:
                    assert reply.status_code in (200, 405), path
                else:
                    assert reply.status_code == 401, (method, path)
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEYS[0]}"}, 200),
        ({"authorization": f"bearer {KEYS[1]}"}, 200),
        ({"x-api-key": KEYS[1]}, 200),
        ({"authorization": f"Basic {KEYS[0]}"}, 401),
        ({"authorization": KEYS[0]}, 401),
        ({"x-api-key": KEYS[0][:-1]}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer"}, 401),
    ],
    ids=str,
)
def test_keys(guarded: RunningServer, headers: dict[str, str], status: int) -> None:
    assert waiting.get(f"{guarded.url}/v1/models", headers=headers).status_code == status


def test_holders_of_different_keys_share_no_prefix(guarded: RunningServer) -> None:
    def cached(key: str, **fields: object) -> int:
        reply = waiting.post(
            f"{guarded.url}/v1/completions", json={**BODY, **fields}, headers={"x-api-key": key}
        )
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[0], cache_salt="other") == 0
    guarded.wait_until_idle()


def test_a_key_sees_the_timelines_of_its_own_requests_only(guarded: RunningServer) -> None:
    with waiting.PatientClient(base_url=guarded.url) as http:
        for key in KEYS:
            headers = {"x-api-key": key}
            body = {**BODY, "request_id": f"of-{key[:5]}"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        for key, other in (KEYS, KEYS[::-1]):
            headers = {"x-api-key": key}
            seen = http.get("/admin/requests", headers=headers).json()["requests"]
            ids = {item["request_id"] for item in seen}
            assert f"of-{key[:5]}" in ids and f"of-{other[:5]}" not in ids
            assert not any("tenant" in item for item in seen)
            own = http.get(f"/admin/requests/of-{key[:5]}", headers=headers)
            assert own.status_code == 200
            foreign = http.get(f"/admin/requests/of-{other[:5]}", headers=headers)
            assert foreign.status_code == 404


def test_one_key_has_so_many_requests_at_once(guarded: RunningServer) -> None:
    guarded.client.paused = True
    url, headers = f"{guarded.url}/v1/completions", {"x-api-key": KEYS[0]}
    with ThreadPoolExecutor(2) as pool:
        queued = [pool.submit(waiting.post, url, json=BODY, headers=headers) for _ in range(2)]
        guarded.wait_until_open(2)
        reply = waiting.post(url, json=BODY, headers=headers)
        assert reply.status_code == 429 and "max_requests_per_key" in reply.text
        assert int(reply.headers["retry-after"]) >= 1
        other = waiting.get(f"{guarded.url}/version", headers={"x-api-key": KEYS[1]})
        assert other.status_code == 200
        guarded.client.paused = False
        assert [found.result().status_code for found in queued] == [200, 200]
    guarded.wait_until_idle()


def test_too_many_headers(guarded: RunningServer) -> None:
    headers = {"x-api-key": KEYS[0], **{f"x-{i}": "v" for i in range(100)}}
    reply = waiting.get(f"{guarded.url}/version", headers=headers)
    assert reply.status_code == 431 and "max_headers" in reply.json()["error"]["message"]


def status_for_host(
    gate: Gate, host: bytes | None, *, method: str = "GET", origin: bytes = b""
) -> int:
    """Return the status of a request with this Host header to the version. origin: origin of the
    page that sends it."""
    statuses: list[int] = []
    headers = [] if host is None else [(b"host", host)]
    headers += [(b"origin", origin)] if origin else []
    scope = {"type": "http", "method": method, "path": "/version", "headers": headers}

    async def receive() -> Any:
        raise AssertionError("nobody reads a body")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(gate(scope, receive, send))
    return statuses[0]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await Response(b"")(scope, receive, send)


LOCAL = (
    b"localhost", b"LocalHost:8000", b"localhost.", b"localhost:", b"quire.localhost:80",
    b"127.0.0.1", b"127.0.0.1:1", b"127.0.0.2:8000", b"127.255.255.254", b"[::1]", b"[::1]:8000",
    b"[0:0:0:0:0:0:0:1]:8000", b"[::ffff:127.0.0.1]:80", b"",
)  # fmt: skip
FOREIGN = (
    b"evil.example", b"evil.example:80", b"localhost.evil.example", b"127.0.0.1.evil.example",
    b"evil.example:127.0.0.1", b"evillocalhost", b"127.0.0.256", b"128.0.0.1", b"[::2]", b"0.0.0.0",
    b"10.0.0.1:8000", b"host.docker.internal:8000", b"[127.0.0.1", b"::1:x", b"\xff", b".localhost",
)  # fmt: skip


@pytest.mark.parametrize("host", LOCAL, ids=str)
def test_every_name_of_this_machine_gets_through(host: bytes) -> None:
    assert status_for_host(Gate(answer, ServerSettings()), host) == 200


@pytest.mark.parametrize("host", FOREIGN, ids=str)
def test_a_foreign_host_is_refused_without_a_key(host: bytes) -> None:
    assert status_for_host(Gate(answer, ServerSettings()), host) == 403


@pytest.mark.parametrize("allowed", ["Box.Example", "box.example:9000"])
def test_an_allowed_host_may_have_capitals_and_a_port(allowed: str) -> None:
    gate = Gate(answer, ServerSettings(allowed_hosts=(allowed,)))
    assert status_for_host(gate, b"box.Example:9000") == 200
    assert status_for_host(gate, b"box.example.evil:9000") == 403
    assert status_for_host(gate, b"box.example:1") == (403 if ":" in allowed else 200)


@pytest.mark.parametrize("host", [b"evil.example", b"host.docker.internal:8000", b""], ids=str)
def test_no_host_matters_with_a_key_or_over_a_unix_socket(host: bytes) -> None:
    """A key is what a web page lacks, and no web page reaches a Unix socket."""
    assert status_for_host(Gate(answer, ServerSettings(uds="/tmp/q")), host) == 200
    assert status_for_host(Gate(answer, ServerSettings(api_key=KEYS)), host) == 401


PAGE = "https://ui.example"


@pytest.mark.parametrize(
    ("origin", "given", "is_refused"),
    [
        ("https://evil.example", {}, True),
        ("null", {}, True),
        ("http://localhost:3000", {}, True),
        ("http://localhost:8000", {}, False),
        ("", {}, False),
        (PAGE, {}, True),
        (PAGE, {"allowed_origins": (PAGE,)}, False),
        ("null", {"allowed_origins": ("*",)}, False),
        ("https://evil.example", {"uds": "/tmp/q"}, False),
    ],
    ids=str,
)
def test_a_foreign_page_changes_nothing_without_a_key(
    origin: str, given: dict[str, Any], is_refused: bool
) -> None:
    """Fault: a form of any web page stores files, and pauses the engine. A browser asks first only
    before it sends JSON."""
    gate = Gate(answer, ServerSettings(**given))
    for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE"):
        status = status_for_host(gate, b"LocalHost:8000", method=method, origin=origin.encode())
        is_safe = method in ("GET", "HEAD", "OPTIONS")
        assert status == (403 if is_refused and not is_safe else 200), method


def test_a_foreign_page_uploads_nothing(server: RunningServer) -> None:
    for origin, status in (("https://evil.example", 403), (server.url, 404)):  # no --data-dir
        files, headers = {"file": b"x"}, {"origin": origin}
        reply = waiting.post(f"{server.url}/v1/files", files=files, headers=headers)
        assert reply.status_code == status
        assert ("--allowed-origins" in reply.text) == (status == 403)


def test_the_host_is_checked_over_a_socket(server: RunningServer) -> None:
    for host, status in (("localhost", 200), ("127.0.0.2:1", 200), ("evil.example:80", 403)):
        reply = waiting.get(f"{server.url}/version", headers={"host": host})
        assert reply.status_code == status, host


def test_pages_of_named_origins_may_call(front: ModelFront) -> None:
    settings = ServerSettings(api_key=KEYS, allowed_origins=("https://ui.example",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    with running_server(front, settings) as server:
        for origin, status in (("https://ui.example", 200), ("https://evil.example", 400)):
            headers = {"origin": origin, **asked}
            reply = waiting.options(f"{server.url}/v1/completions", headers=headers)
            assert reply.status_code == status
            assert ("access-control-allow-origin" in reply.headers) == (status == 200)


def test_request_ids_come_back(server: RunningServer) -> None:
    def returned(given: str) -> str:
        return waiting.get(f"{server.url}/version", headers={"x-request-id": given}).headers[
            "x-request-id"
        ]

    assert returned("mine-1") == "mine-1"
    assert returned("x" * 129) != "x" * 129
    assert returned("") != ""


def test_listening_to_the_world_wants_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key=(KEYS[0],)).api_key
    assert ServerSettings(host="0.0.0.0", insecure_no_auth=True)


@pytest.mark.parametrize("key", ["", " key", "key\n", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ServerSettings(api_key=(key,))


def test_a_short_key_is_taken_with_a_warning() -> None:
    """Deployments of other servers have short ones."""
    warning = ServerSettings(api_key=(KEYS[0], "short")).key_warning
    assert warning is not None and "key of 5 characters" in warning and "short" not in warning
    assert ServerSettings(api_key=KEYS).key_warning is None
    assert ServerSettings().key_warning is None


def test_keys_are_tenants_with_weights(guarded: RunningServer) -> None:
    """The policy `fair` gets the tenant and the weight, and never the key itself."""
    for key, weight in zip(KEYS, (1.0, 2.5), strict=True):
        waiting.post(f"{guarded.url}/v1/completions", json=BODY, headers={"x-api-key": key})
        asked = guarded.client.added[-1].scheduling
        assert asked.weight == weight
        assert asked.tenant and key not in asked.tenant
    assert len({request.scheduling.tenant for request in guarded.client.added[-2:]}) == 2


def test_a_lone_key_is_the_tenant_that_it_is_beside_others(
    front: ModelFront, guarded: RunningServer
) -> None:
    """Fault: a second key makes another caller of the first, who loses what was kept."""
    lone = ServerSettings(api_key=KEYS[:1], disable_access_log=True)
    with running_server(front, lone) as server:
        for each in (server, guarded):
            asked = {**BODY, "max_tokens": 1}
            waiting.post(f"{each.url}/v1/completions", json=asked, headers={"x-api-key": KEYS[0]})
        named = [each.client.added[-1].scheduling.tenant for each in (server, guarded)]
    assert named[0] == named[1] != ""


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0), (1.0, 0.0), (1.0, float("nan"))])
def test_weights_are_one_for_each_key_and_above_zero(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="api_key_weight"):
        ServerSettings(api_key=KEYS, api_key_weights=weights)
