"""Clients that leave, dawdle, or send nonsense: nothing of them stays, and others go on."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.engine.model_front import ModelFront
from quire.protocol.status import EngineState
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests import waiting
from tests.profiles import seeds
from tests.server.in_memory import InMemoryClient
from tests.server.running import RunningServer, running_server
from tests.waiting import WAIT_S, wait_for

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lively(front: ModelFront) -> Iterator[RunningServer]:
    settings = ServerSettings(disable_access_log=True, limits=Limits(sse_keep_alive_s=0.1))
    with running_server(front, settings, InMemoryClient(step_s=0.001)) as found:
        yield found


@pytest.fixture(scope="module")
def strict(front: ModelFront) -> Iterator[RunningServer]:
    """Impatient, so that tests need not be patient: for those that wait for the limits."""
    limits = Limits(header_timeout_s=1.0, max_header_bytes=4096, body_timeout_s=1.0)
    settings = ServerSettings(disable_access_log=True, limits=limits)
    with running_server(front, settings) as found:
        yield found


@pytest.fixture(autouse=True)
def _ready_again(lively: RunningServer) -> Iterator[None]:
    yield
    lively.client.paused = False
    lively.client.state = EngineState.READY
    lively.wait_until_idle()


def raw_request(body: dict[str, object], path: str = CHAT) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    ).encode() + content


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("seed", seeds(3))
def test_clients_that_leave_at_any_byte_leave_nothing(lively: RunningServer, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(25):
        request = raw_request(
            {
                "messages": MESSAGES,
                "max_tokens": 300,
                "stream": bool(number % 2),
                "n": 1 + number % 3,
                "ignore_eos": True,
            }
        )
        with connect(lively) as connection:
            sent = chance.choice([len(request), chance.randrange(len(request))])
            connection.sendall(request[:sent])
            if sent == len(request):
                connection.settimeout(chance.random() * 0.02 + 0.001)
                with contextlib.suppress(TimeoutError):
                    connection.recv(chance.randrange(1, 500))
    lively.wait_until_idle()


def test_an_abort_is_noticed_while_nothing_is_written(lively: RunningServer) -> None:
    lively.client.paused = True
    with connect(lively) as connection:
        connection.sendall(raw_request({"messages": MESSAGES, "max_tokens": 5}))
        lively.wait_until_open()
    wait_for(lambda: not lively.call(lambda: lively.client.num_unfinished), "abort")


def test_a_reader_that_stops_is_cut_off(front: ModelFront) -> None:
    """Its buffers fill, and its connection ends after the limit, while another stream goes on."""
    limits = Limits(stalled_write_timeout_s=0.3)
    settings = ServerSettings(disable_access_log=True, limits=limits)
    with running_server(front, settings) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = {"prompt": ["a"] * 16, "n": 16, "max_tokens": 400, "ignore_eos": True}
        options = {"stream": True, "logprobs": 20}
        connection.sendall(raw_request({**body, **options}, "/v1/completions"))
        server.wait_until_open()
        other = waiting.post(f"{server.url}{CHAT}", json={"messages": MESSAGES, "max_tokens": 5})
        assert other.status_code == 200
        load = f"{server.url}/load"
        wait_for(lambda: waiting.get(load).json()["server_load"] == 0, "end of the connection")
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /version HTTP/1.1\r\nx: " + b"a" * 10_000, b"431"),
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\n", b"408"),
        (b"\x00\x01\x02garbage\r\n\r\n", b"400"),
        (raw_request({"messages": MESSAGES})[:-5], b"408"),
    ],
    ids=["giant header", "slow header", "garbage", "slow body"],
)
def test_bad_connections_end(strict: RunningServer, sent: bytes, status: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        assert read_until(connection, b"\r\n").split()[1] == status


def test_a_body_that_nobody_reads_does_not_keep_its_connection(strict: RunningServer) -> None:
    """The route is unknown, so the answer comes at once; the body then drips on."""
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert read_until(connection, b"\r\n").split()[1] in (b"403", b"404")
        with pytest.raises(ConnectionError):
            wait_for(lambda: connection.sendall(b"x"), "end of the connection")


def test_a_body_that_was_not_read_leaves_the_connection_usable(server: RunningServer) -> None:
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\n")
            connection.sendall(b"content-length: 1000\r\n\r\n")
            assert b"404" in read_until(connection, b"There is no route")
            connection.sendall(b"x" * 1000)


def test_connections_are_bounded(front: ModelFront) -> None:
    settings = ServerSettings(disable_access_log=True, limits=Limits(max_connections=2))
    with running_server(front, settings) as server, connect(server), connect(server):
        with connect(server) as third:
            third.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            reply = read_all(third)
        assert reply.startswith(b"HTTP/1.1 503") and b"retry-after: " in reply
        assert b"max_connections" in reply


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = connection.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def test_the_queue_is_bounded(front: ModelFront) -> None:
    limits = Limits(max_queue_requests=4)
    settings = ServerSettings(disable_access_log=True, limits=limits)
    with running_server(front, settings) as server, contextlib.ExitStack() as connections:
        server.client.paused = True
        for _ in range(4):
            connection = connections.enter_context(connect(server))
            connection.sendall(raw_request({"messages": MESSAGES, "max_tokens": 2}))
        server.wait_until_open(4)
        reply = waiting.post(f"{server.url}{CHAT}", json={"messages": MESSAGES})
        assert reply.status_code == 503 and "max_queue_requests" in reply.text
        assert int(reply.headers["retry-after"]) >= 1


def test_who_has_queued_too_long_is_sent_away(front: ModelFront) -> None:
    settings = ServerSettings(disable_access_log=True, limits=Limits(max_queue_s=0.2))
    with running_server(front, settings) as server:
        server.client.paused = True
        late = waiting.post(f"{server.url}{CHAT}", json={"messages": MESSAGES})
        assert late.status_code == 503 and "max_queue_s" in late.text
        assert int(late.headers["retry-after"]) >= 1


def test_a_quiet_stream_is_kept_alive(lively: RunningServer) -> None:
    with connect(lively) as connection:
        lively.client.step_s = 0.35
        connection.sendall(raw_request({"messages": MESSAGES, "max_tokens": 3, "stream": True}))
        data = read_until(connection, b"[DONE]")
        lively.client.step_s = 0.001
    assert b": keep-alive\n\n" in data


@pytest.mark.parametrize("count", [("n", 4), ("prompt", ["a"] * 4)], ids=["samples", "prompts"])
def test_logprobs_of_a_whole_response_are_bounded(
    front: ModelFront, count: tuple[str, object]
) -> None:
    """Four samples or four prompts may take no more together than one may alone."""
    per_sample = 10 * (1 + 5) * 64  # tokens x candidates x about 64 bytes
    limits = Limits(max_logprobs_bytes=2 * per_sample)
    settings = ServerSettings(disable_access_log=True, limits=limits)
    body = {"prompt": "a", "max_tokens": 10, "ignore_eos": True, "logprobs": 5}
    with running_server(front, settings) as server:
        url = f"{server.url}/v1/completions"
        assert waiting.post(url, json=body).status_code == 200
        reply = waiting.post(url, json={**body, count[0]: count[1]})
        assert reply.status_code == 400 and "max_logprobs_bytes" in reply.text
        stream = waiting.post(url, json={**body, count[0]: count[1], "stream": True})
        assert "max_logprobs_bytes" in stream.text.split("\n\n")[-2]
        server.wait_until_idle()


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_ends_in_one_way(lively: RunningServer, after: int) -> None:
    """With an error event when the engine is lost, and with [DONE] when it is not."""
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": True, "ignore_eos": True}
    lively.call(lambda: setattr(lively.client, "fail_after", after))
    lost = waiting.post(f"{lively.url}{CHAT}", json=body)
    assert "engine was lost" in lost.text.split("\n\n")[-2]
    assert lost.text.count('"error"') == 1 and "[DONE]" not in lost.text
    whole = waiting.post(f"{lively.url}{CHAT}", json=body)
    assert whole.text.endswith("data: [DONE]\n\n") and '"error"' not in whole.text


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.READY])
def test_probes_tell_the_truth(lively: RunningServer, state: EngineState) -> None:
    lively.client.state = state
    with waiting.PatientClient(base_url=lively.url) as http:
        assert http.get("/readyz").status_code == 503
        assert http.get("/readyz").json()["status"] == state.value
        assert http.get("/livez").status_code == (503 if state is EngineState.DEAD else 200)
        is_well = state in (EngineState.SLEEPING, EngineState.DRAINING)
        assert http.get("/health").status_code == (200 if is_well else 503)
        for path in (CHAT, "/v1/completions", "/tokenize"):
            reply = http.post(path, json={"messages": MESSAGES})
            assert reply.status_code == 503 and state.value in reply.text
            assert "retry-after" in reply.headers
        assert http.get("/v1/models").status_code == 503
        assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_is_cut_off_by_a_shutdown_is_told_so(front: ModelFront, is_stream: bool) -> None:
    """Not that the engine died: 503, and when to try again."""
    with running_server(front) as server, ThreadPoolExecutor(1) as pool:
        server.client.paused = True
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": is_stream}
        cut = pool.submit(waiting.post, f"{server.url}{CHAT}", json=body)
        server.wait_until_open()
        server.call(server.backend.drain)
        server.client.state = EngineState.DEAD  # as after `AsyncEngineClient.close`
        server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.client.close()))
        late = waiting.post(f"{server.url}{CHAT}", json=body)
        for reply in (cut.result(), late):
            assert reply.text.count("shutting down") == 1 and '"code":503' in reply.text
            assert "dead" not in reply.text
            if reply is late or not is_stream:
                assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        assert waiting.get(f"{server.url}/readyz").json()["status"] == "draining"
        assert waiting.get(f"{server.url}/livez").status_code == 200


def test_draining_lets_open_streams_end(lively: RunningServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 100, "stream": True, "ignore_eos": True}
    with waiting.stream("POST", f"{lively.url}{CHAT}", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        lively.client.state = EngineState.DRAINING
        assert waiting.post(f"{lively.url}{CHAT}", json=body).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
