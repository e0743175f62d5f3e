"""The whole command: a process that serves the bundled model, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.errors import ConfigError
from quire.server.processes.listening import listening
from quire.server.settings import ServerSettings
from tests import waiting
from tests.forked import SERVER, TEMPLATE, ForkedServer, name_of, template_of
from tests.server.fake_serve import listening_sockets, members_of
from tests.waiting import WAIT_S, wait_for

CODE = """
import sys
from quire.config.settings import EngineSettings
from quire.base.errors import QuireError
from quire.server import ServerSettings, run_server
try:
    status = run_server(
        EngineSettings(max_model_len=512, num_kv_blocks=256, num_threads=1, quiet=True),
        ServerSettings(
            port=int(sys.argv[1]),
            shutdown_timeout=float(sys.argv[2]),
            uds=sys.argv[3] or None,
        ),
    )
except QuireError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("torch" in sys.modules, "transformers" in sys.modules)
sys.exit(status)
"""
CHAT = "/v1/chat/completions"
LONG = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 480,
    "ignore_eos": True,
    "stream": True,
}


class Serving:
    """The process, its address, and what it wrote to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += [""]
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def text(self) -> str:
        """So far."""
        return "".join(self.lines)

    def url(self) -> str:
        found = wait_for(lambda: re.search(r"listens on (\S+)", self.text), "the port")
        assert found is not None
        return found.group(1)

    def wait_until_ready(self) -> str:
        url = self.url()
        wait_for(lambda: get_status(url) == 200, "readiness")
        return url

    def end(self) -> int:
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return status


HUNG_UP = (httpx.NetworkError, httpx.RemoteProtocolError)
"""Errors of a client at a server that ends. It resets connections that it has not accepted yet."""


def get_status(url: str) -> int:
    try:
        return waiting.get(f"{url}/readyz").status_code
    except HUNG_UP:
        return 0


@contextmanager
def serving(
    tmp_path: Path,
    shutdown_timeout: float = WAIT_S,
    port: int = 0,
    uds: str = "",
    code: str = CODE,
    is_forked: bool = False,
) -> Iterator[Serving]:
    """is_forked: fork it and its cores (tests/forked.py), in place of starting Python."""
    arguments = ("-c", code, str(port), str(shutdown_timeout), uds)
    with _started(tmp_path, arguments, subprocess.PIPE, is_forked) as server:
        yield server


@contextmanager
def serving_by_command(tmp_path: Path, *flags: str, is_forked: bool = False) -> Iterator[Serving]:
    """`quire serve` on a free port. tmp_path: folder of its temporary files. It is killed at the
    end, if it lives. is_forked: see `serving`."""
    arguments = ("-m", "quire", "serve", "--port", "0", *flags)
    with _started(tmp_path, arguments, subprocess.DEVNULL, is_forked) as server:
        yield server


@contextmanager
def _started(
    tmp_path: Path, arguments: Sequence[str], stdout: int, is_forked: bool
) -> Iterator[Serving]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    starting: Any
    if is_forked:
        starting = ForkedServer(template_of(SERVER), arguments, environment)
    else:
        starting = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
    with starting as process:
        server = Serving(process)
        try:
            yield server
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            server.end()


def children(pid: int) -> list[str]:
    """Process ids, without that of a template."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for each in found if name_of(each) != TEMPLATE]


def test_serves_drains_and_leaves_nothing(short_tmp: Path) -> None:
    with serving(short_tmp) as server:
        url = server.url()
        early = waiting.get(f"{url}/readyz")
        assert early.status_code in (200, 503) and "status" in early.json()
        server.wait_until_ready()
        answer = waiting.post(f"{url}{CHAT}", json={**LONG, "stream": False, "max_tokens": 5})
        assert waiting.get(f"{url}/no-such-route").status_code == 404
        wait_for(lambda: '"GET /no-such-route HTTP/1.1" 404' in server.text, "line of the log")
        assert f'"POST {CHAT} HTTP/1.1" 200' in server.text
        assert '"GET /readyz HTTP/1.1" 200' not in server.text  # what goes well is no news
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
        (core,) = children(server.process.pid)
        listeners = listening_sockets(port := int(url.rpartition(":")[2]))
        assert len(listeners) == 1
        with waiting.stream("POST", f"{url}{CHAT}", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            refused = wait_for(lambda: refusal(url), "refusal")
            assert refused == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read().split() == ["False", "False"]
    assert not Path(f"/proc/{core}").exists()
    assert list(short_tmp.iterdir()) == []
    assert listeners.isdisjoint(listening_sockets(port))
    assert "export OPENAI_BASE_URL=" + url in server.text
    assert "Application startup complete." in server.text and "tokens" in server.text


NEXT_CORE_WAITS = """
import asyncio, os
from quire.engine.supervision.supervisor import EngineSupervisor
start_process = EngineSupervisor._start_process
async def held_up(supervisor):
    while os.path.exists("{held}"):
        await asyncio.sleep(0.01)
    return await start_process(supervisor)
EngineSupervisor._start_process = held_up
"""


def test_streams_outlive_the_core(short_tmp: Path, tmp_path: Path) -> None:
    """The core is killed while two clients read: they read on, to the same text, and the probes
    tell what happened."""
    asked = {**LONG, "max_tokens": 150, "seed": 5, "temperature": 0.9, "n": 2}
    held = tmp_path / "held"
    code = NEXT_CORE_WAITS.replace("{held}", str(held)) + CODE
    with serving(short_tmp, code=code, is_forked=True) as server:
        url = server.wait_until_ready()
        uncut = text_of(waiting.post(f"{url}{CHAT}", json=asked).text)
        with waiting.stream("POST", f"{url}{CHAT}", json=asked) as stream:
            chunks = stream.iter_text()
            read = next(chunks)
            (core,) = children(server.process.pid)
            held.touch()
            os.kill(int(core), signal.SIGKILL)
            wait_for(lambda: get_status(url) == 503, "word of the death")
            assert waiting.get(f"{url}/livez").status_code == 200
            held.unlink()
            read += "".join(chunks)
        assert read.endswith("data: [DONE]\n\n") and read.count("[DONE]") == 1
        assert text_of(read) == uncut
        # The text may have been there before the core died, and the next one still be starting.
        wait_for(lambda: get_status(url) == 200, "readiness")
        again = waiting.post(f"{url}{CHAT}", json={**LONG, "stream": False, "max_tokens": 3})
        assert again.status_code == 200
        assert "quire:engine_restarts" in waiting.get(f"{url}/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    (dumps,) = short_tmp.iterdir()
    assert all("-fault-" in each.name for each in dumps.iterdir()), "the recorder's, of the death"


def text_of(events: str) -> dict[int, str]:
    """Return the texts by sample."""
    found: dict[int, str] = {}
    for event in events.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                text = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
                found[choice["index"]] = text
    return found


def refusal(url: str) -> int:
    try:
        status = waiting.post(f"{url}{CHAT}", json={**LONG, "stream": False}).status_code
    except HUNG_UP:
        return 503
    return status if status != 200 else 0


@pytest.mark.parametrize("second", [None, signal.SIGTERM], ids=["deadline", "second signal"])
def test_requests_that_do_not_end_get_an_error(
    short_tmp: Path, second: signal.Signals | None
) -> None:
    with serving(
        short_tmp, shutdown_timeout=0.1 if second is None else 3600.0, is_forked=True
    ) as server:
        url = server.wait_until_ready()
        body = {**LONG, "n": 16}
        with waiting.stream("POST", f"{url}{CHAT}", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            if second is not None:
                wait_for(lambda: get_status(url) != 200, "sign of the first signal")
                server.process.send_signal(second)
            last = [line for line in lines if line][-1]
            assert '"error"' in last or last == "data: [DONE]"
        assert server.end() == 0
    assert list(short_tmp.iterdir()) == []


PROCESSES = ["forked_serve", "rank_process", "real_core_process"[:15]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_drains(short_tmp: Path, number: signal.Signals) -> None:
    """Shells send Ctrl-C, and service managers send SIGTERM, to the core and to the ranks that it
    has started as well. Turns red when one of them ends at it, or stays."""
    code = CODE.replace("num_threads=1", "num_threads=1, tensor_parallel_size=2")
    with serving(short_tmp, code=code, is_forked=True) as server:
        url = server.wait_until_ready()
        names = [name_of(str(each)) for each in members_of(server.process.pid)]
        assert sorted(set(names) - {TEMPLATE}) == PROCESSES
        with waiting.stream("POST", f"{url}{CHAT}", json={**LONG, "n": 4}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.killpg(server.process.pid, number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end() == 0
    assert "the engine core ended" not in server.text and "Traceback" not in server.text
    assert "the other ranks are ended" not in server.text
    wait_for(lambda: not members_of(server.process.pid), "end of all processes")
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_a_signal_to_the_whole_group_while_it_starts(short_tmp: Path, delay_s: float) -> None:
    with serving(short_tmp) as server:
        server.url()
        time.sleep(delay_s)
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.end() == 0
    assert "Error" not in server.text
    assert list(short_tmp.iterdir()) == []


def test_a_port_in_use_is_one_clear_line(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(short_tmp, port=port, is_forked=True) as server:
            assert server.end() == 1
            assert f"ConfigError: Cannot listen on 127.0.0.1:{port}" in server.text
            assert "Traceback" not in server.text


def test_an_http_server_that_cannot_start_is_a_failure(short_tmp: Path) -> None:
    """Here because the application does not start."""
    broken = (
        "import contextlib, fastapi, quire.server.processes.sole_front as run\n"
        "@contextlib.asynccontextmanager\n"
        "async def lifespan(app):\n    raise OSError('no start')\n    yield\n"
        "run.create_app = lambda *_: fastapi.FastAPI(lifespan=lifespan)\n"
    )
    with serving(short_tmp, code=broken + CODE, is_forked=True) as server:
        assert server.end() == 1
    assert "EngineError: The HTTP server cannot start." in server.text
    assert list(short_tmp.iterdir()) == []


def test_an_http_server_that_ends_by_itself_is_a_failure(short_tmp: Path) -> None:
    ends = (
        "import quire.server.processes.sole_front as run\n"
        "async def serve(self, sockets=None):\n    pass\n"
        "run.HttpServer.serve = serve\n"
    )
    with serving(short_tmp, code=ends + CODE, is_forked=True) as server:
        assert server.end() == 1
    assert "EngineError: The HTTP server ended by itself." in server.text
    assert list(short_tmp.iterdir()) == []


def test_bad_tls_files_are_one_clear_line(short_tmp: Path) -> None:
    code = CODE.replace("uds=", "ssl_keyfile='/no/key', ssl_certfile='/no/cert', uds=")
    with serving(short_tmp, code=code, is_forked=True) as server:
        assert server.end() == 1
    assert "ConfigError: The TLS files /no/key and /no/cert cannot be used" in server.text
    assert "Traceback" not in server.text


def test_a_unix_socket_serves_and_is_removed(short_tmp: Path) -> None:
    path = short_tmp / "socket"
    code = CODE.replace("uds=", "log_level='warning', uds=")
    with serving(short_tmp, uds=str(path), code=code, is_forked=True) as server:
        wait_for(path.exists, "socket")
        with waiting.PatientClient(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as http:
            wait_for(lambda: http.get("/readyz").status_code == 200, "readiness")
            assert http.post(CHAT, json={**LONG, "max_tokens": 3}).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
    assert "INFO " not in server.text, "log_level"
    assert list(short_tmp.iterdir()) == []


def test_the_socket_of_a_killed_server_is_replaced(short_tmp: Path) -> None:
    path = short_tmp / "socket"
    settings = ServerSettings(uds=str(path))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
        with pytest.raises(ConfigError, match="Stop what listens"), listening(settings):
            pass
    with listening(settings) as listeners:
        assert listeners[0].getsockname() == str(path)
    path.write_text("kept")
    with pytest.raises(ConfigError), listening(settings):
        pass
    assert path.read_text() == "kept"
