"""Keys, hosts, headers: what guards every route."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.engine.model_front import ModelFront
from quire.errors import ConfigError
from quire.server.http.gate import OPEN_PATHS
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
    paths = [*routes(guarded), "/docs", "/redoc", "/openapi.json", "/no-such", "/livez/", "//livez"]
    assert "/metrics" in paths and "/tokenize" in paths
    with waiting.PatientClient(base_url=guarded.url) as http:
        for path in paths:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = http.request(method, path)
                if path in OPEN_PATHS:
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


def test_a_foreign_host_is_refused_without_a_key(server: RunningServer) -> None:
    for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("evil.example:80", 403)):
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
    """What the policy `fair` is told, and the key itself never."""
    for key, weight in zip(KEYS, (1.0, 2.5), strict=True):
        waiting.post(f"{guarded.url}/v1/completions", json=BODY, headers={"x-api-key": key})
        asked = guarded.client.added[-1].scheduling
        assert asked.weight == weight
        assert asked.tenant and key not in asked.tenant
    assert len({request.scheduling.tenant for request in guarded.client.added[-2:]}) == 2


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0), (1.0, 0.0), (1.0, float("nan"))])
def test_weights_are_one_for_each_key_and_above_zero(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="api_key_weight"):
        ServerSettings(api_key=KEYS, api_key_weights=weights)
