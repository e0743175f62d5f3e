"""Answers on the port until a front takes over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.protocol.status import CORE_STARTS, EngineState, EngineStatus, StartPhase
from quire.server.generation.backend import Backend
from quire.server.processes.listening import listening
from quire.server.processes.stand_in import StandIn
from quire.server.readings.short_status import ShortStatus, short_status
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests.server.test_fronts import TWO_FRONTS, fronts_of
from tests.server.test_run import CHAT, CODE, LONG, serving
from tests.waiting import WAIT_S, PatientAsyncClient, get, in_a_loop, post, wait_for

FRONTS_WAIT = """
import sys
from quire.server.processes import watched_front
front = "quire.server.processes.front_process"
wait = "while [ ! -e {go} ]; do sleep 0.05; done; exec {python} -m " + front
watched_front.FRONT_COMMAND = ("sh", "-c", wait.format(go="{go}", python=sys.executable))
"""
IMPORT_WAITS = """
import pathlib, time
from quire.server.processes import run
imported = run._imported
def wait(server):
    while not pathlib.Path("{go}").exists():
        time.sleep(0.05)
    return imported(server)
run._imported = wait
"""


@dataclass
class Standing:
    stand_in: StandIn
    listener: socket.socket
    url: str

    async def exchange(self, data: bytes) -> bytes:
        """All that comes back for it until the connection ends."""
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await asyncio.wait_for(reader.read(), WAIT_S)
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def standing(settings: ServerSettings | None = None) -> AsyncGenerator[Standing]:
    settings = settings or ServerSettings(port=0)
    with listening(settings) as listeners:
        async with StandIn(settings) as stand_in:
            await stand_in.open(listeners)
            port = listeners[0].getsockname()[1]
            yield Standing(stand_in, listeners[0], f"http://127.0.0.1:{port}")


def check_refusal(answer: httpx.Response, phase: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 503
    assert error["type"] == "ServiceUnavailableError" and phase in error["message"]
    assert int(answer.headers["retry-after"]) >= 1


@in_a_loop
async def test_probes_tell_the_phase_and_the_rest_is_refused_with_it() -> None:
    async with standing() as server, PatientAsyncClient(base_url=server.url) as http:
        alive = await http.get("/livez")
        assert (alive.status_code, alive.json()["status"]) == (200, "starting")
        assert (await http.head("/livez")).content == b""
        server.stand_in.status = lambda: ShortStatus("starting", "loading", 2.1)
        for probe in ("/readyz", "/health"):
            answer = await http.get(probe)
            assert answer.status_code == 503
            assert answer.json() == {"status": "starting", "phase": "loading", "seconds": 2.1}
        check_refusal(await http.get("/v1/models"), "starting (loading, 2.1 s)")
        server.stand_in.status = lambda: ShortStatus("dead")
        assert (await http.get("/livez")).status_code == 503
        check_refusal(await http.post(CHAT, json=LONG), "dead")


@in_a_loop
async def test_a_large_body_gets_its_answer_too() -> None:
    async with standing() as server, PatientAsyncClient(base_url=server.url) as http:
        check_refusal(await http.post(CHAT, content=b"x" * 5_000_000), "importing")


@in_a_loop
async def test_what_is_not_a_request_ends_its_own_connection() -> None:
    settings = ServerSettings(port=0, limits=Limits(header_timeout_s=0.2))
    async with standing(settings) as server:
        assert await server.exchange(b"GET /livez HTTP/1.1\r\nhost") == b""  # timed out
    async with standing() as server:
        assert await server.exchange(b"x" * 100_000) == b""
        assert (await server.exchange(b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        answer = await server.exchange(b"GET /livez HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"}")


@in_a_loop
async def test_a_prefix_of_a_proxy_is_known() -> None:
    async with standing(ServerSettings(port=0, root_path="/api")) as server:
        assert b" 200 OK" in await server.exchange(b"GET /api/livez?x=1 HTTP/1.1\r\n\r\n")


@in_a_loop
async def test_a_socket_is_left_to_the_front() -> None:
    async with standing() as server:
        reader, writer = await asyncio.open_connection(*server.listener.getsockname())
        await server.exchange(b"GET /livez HTTP/1.1\r\n\r\n")  # so the one above is accepted
        server.stand_in.leave(server.listener)
        server.stand_in.leave(server.listener)  # nothing happens
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        assert b" 200 OK" in await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"front")
            writer.close()

        async with await asyncio.start_server(greet, sock=server.listener.dup()):
            assert await server.exchange(b"") == b"front"


@in_a_loop
async def test_connections_end_with_it() -> None:
    async with standing() as server:
        reader, writer = await asyncio.open_connection(*server.listener.getsockname())
        await server.exchange(b"GET /livez HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    assert len(asyncio.all_tasks()) == 1


def test_a_start_always_has_a_phase_and_only_a_start() -> None:
    """Fault: none from the end of the imports to the first heartbeat of the core."""
    found = Backend().status
    assert found.state is EngineState.STARTING
    assert short_status(found).phase == CORE_STARTS
    backend, loading = Backend(), (StartPhase("loading", 2.0, is_done=False),)
    client: Any = SimpleNamespace(status=EngineStatus(EngineState.STARTING, loading))
    backend.serve(client)
    assert short_status(backend.status) == ShortStatus("starting", "loading", 2.0)
    client.status = EngineStatus(EngineState.READY, (StartPhase("loading", 2.0),))
    assert short_status(backend.status).phase == "loading the tokenizer"
    assert short_status(EngineStatus(EngineState.READY, loading)) == ShortStatus("ready")


@pytest.mark.parametrize(
    ("code", "wait", "phase"),
    [(CODE, IMPORT_WAITS, "importing"), (TWO_FRONTS, FRONTS_WAIT, "fronts")],
    ids=["one front", "two fronts"],
)
def test_the_port_answers_before_the_fronts_are_imported(
    code: str, wait: str, phase: str, short_tmp: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with serving(short_tmp, code=wait.replace("{go}", str(go)) + code) as server:
        url = server.url()
        for _ in range(8):  # at whichever socket of the fronts
            assert get(f"{url}/livez").status_code == 200
            check_refusal(post(f"{url}{CHAT}", json=LONG), "starting")
        wait_for(lambda: get(f"{url}/readyz").json()["phase"] == phase, f"phase {phase}")
        check_refusal(get(f"{url}/v1/models"), phase)
        go.touch()
        server.wait_until_ready()
        wait_for(lambda: "startup complete" in server.text, "readiness of all")
        for _ in range(8):
            assert get(f"{url}/v1/models").status_code == 200
        assert len(fronts_of(server)) == (2 if code is TWO_FRONTS else 0)
        server.process.terminate()
        assert server.end() == 0
    assert list(short_tmp.iterdir()) == []
