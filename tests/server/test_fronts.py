"""Several front processes on one port and one engine core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.errors import ConfigError
from quire.config.settings import EngineSettings
from quire.engine.core.launch import mark_ready, write_failure
from quire.engine.supervision import supervisor
from quire.protocol.messages import StartFailure
from quire.protocol.status import EngineState
from quire.server import app
from quire.server.generation.backend import Backend, ServedModel
from quire.server.generation.served_model import core_settings, front_settings, served_names
from quire.server.generation.waiting import Party, WaitingRoom
from quire.server.processes import fronts, watched_front
from quire.server.processes.listening import listening
from quire.server.readings.front_board import FrontBoard, FrontReading
from quire.server.readings.histogram import LATENCY_BOUNDS
from quire.server.readings.metrics import ServerMetrics
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.routes.services import Services
from quire.server.settings import ServerSettings
from tests.forked import name_of
from tests.server.fake_serve import listening_sockets
from tests.server.in_memory import InMemoryClient
from tests.server.test_operations import samples
from tests.server.test_run import CHAT, CODE, LONG, Serving, children, refusal, serving
from tests.waiting import WAIT_S, get, post, wait_for
from tests.waiting import stream as open_stream

TWO_FRONTS = CODE.replace("uds=", "api_server_count=2, uds=").replace(
    "max_model_len=512, num_kv_blocks=256", "max_model_len=2048, num_kv_blocks=1024"
)
PATIENT_FRONTS = """
import sys
from quire.server.processes import watched_front
watched_front.FRONT_COMMAND = (sys.executable, "-m", "tests.server.patient_front")
"""
"""A front that replaces another one refuses nobody, however long it takes to be ready."""
ENDLESS = {**LONG, "max_tokens": 1900}
"""An answer as long as the model's context allows. It takes seconds, so a stream that has begun is
met alive."""
MANY = 16
"""So many connections all go to the same one of two fronts once in 2^15 runs."""


def wait_until_up(server: Serving) -> str:
    """Return the address, when all fronts serve."""
    wait_for(lambda: "startup complete" in server.text, "all fronts")
    return server.wait_until_ready()


def fronts_of(server: Serving) -> set[int]:
    """Process ids."""
    found = set()
    for child in children(server.process.pid):
        if name_of(child) in ("front_process", "patient_front"):  # it is forked
            found.add(int(child))
        with contextlib.suppress(FileNotFoundError):
            if b"front_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def front_behind(port: int, client_port: int, fronts: set[int]) -> int:
    """Return the front that has accepted a connection."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if (int(local[-4:], 16), int(remote[-4:], 16)) == (port, client_port):
            link = f"socket:[{rest[6]}]"
            for front in fronts:
                for descriptor in Path(f"/proc/{front}/fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        if os.readlink(descriptor) == link:
                            return front
    raise AssertionError("nobody has the connection")


@contextlib.contextmanager
def streams_on_both(url: str, fronts: set[int]) -> Any:
    """(front, lines) of open streams, until each front has one."""
    port = int(url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        found: list[tuple[int, Any]] = []
        while len({front for front, _ in found}) < 2 and len(found) < MANY:
            stream = stack.enter_context(open_stream("POST", f"{url}{CHAT}", json=ENDLESS))
            lines = stream.iter_lines()
            next(lines)
            _, client_port = stream.extensions["network_stream"].get_extra_info("client_addr")
            found.append((front_behind(port, client_port, fronts), lines))
        assert {front for front, _ in found} == fronts
        yield found


def last_line(lines: Any) -> str:
    """Return the last line of a stream; "cut" if the connection ended before it did."""
    last = ""
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        for line in lines:
            last = line or last
        return last
    return "cut"


def totals(url: str) -> dict[str, float]:
    return samples(get(f"{url}/metrics").text)


def wait_until_counted(url: str, name: str, value: float) -> None:
    wait_for(lambda: totals(url)[name] == value, f"{name} of {value}")


def test_fronts_are_told_of_the_model_as_the_operator_named_it(tmp_path: Path) -> None:
    """Fault: they were told of the folder that the core loads, and served the model as that."""
    for given in (EngineSettings(), EngineSettings(model=str(tmp_path))):
        told = EngineSettings.from_values(front_settings(given))
        assert told == given
        names = served_names(told, ServerSettings())
        assert names == served_names(given, ServerSettings())
        assert core_settings(given) == core_settings(told)


def test_one_front_dies_and_the_other_serves_on(short_tmp: Path) -> None:
    asked = {**LONG, "stream": False, "max_tokens": 3}
    with serving(short_tmp, code=PATIENT_FRONTS + TWO_FRONTS, is_forked=True) as server:
        url = wait_until_up(server)
        first = fronts_of(server)
        assert len(first) == 2 and len(children(server.process.pid)) == 3
        (model,) = get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("bundled", "bundled")
        for _ in range(MANY):
            assert post(f"{url}{CHAT}", json=asked).json()["model"] == "bundled"
        for _ in range(16):  # both fronts answer some of them, but for one time in 32,000
            wait_until_counted(url, "vllm:request_success_total", MANY)
        with streams_on_both(url, first) as streams:
            victim = streams[-1][0]  # whose stream has just begun
            os.kill(victim, signal.SIGKILL)
            ends = [(front == victim, last_line(lines)) for front, lines in streams]
        assert set(ends) == {(True, "cut"), (False, "data: [DONE]")}
        wait_for(lambda: len(fronts_of(server) - {victim}) == 2, "another front")
        wait_until_counted(url, "vllm:kv_cache_usage_perc", 0)
        wait_until_counted(url, "vllm:num_requests_running", 0)
        assert totals(url)["vllm:request_success_total"] >= MANY
        for _ in range(MANY):
            assert post(f"{url}{CHAT}", json=asked).status_code == 200

        second = fronts_of(server)
        listeners = listening_sockets(port := int(url.rpartition(":")[2]))
        assert len(listeners) == 2
        with streams_on_both(url, second) as streams:
            server.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: refusal(url), "refusal") == 503
            assert {last_line(lines) for _, lines in streams} == {"data: [DONE]"}
        assert server.end() == 0
    assert not any(Path(f"/proc/{front}").exists() for front in first | second)
    assert list(short_tmp.iterdir()) == []
    assert listeners.isdisjoint(listening_sockets(port))
    assert server.text.count("Uvicorn running on " + url) == 1


HUNG_SOON = """
import functools, pathlib
from quire.server.processes import owner
from quire.server.processes.watched_front import WatchedFront
owner.Fronts = functools.partial(owner.Fronts, hang_limit_s=2.0)
hear = WatchedFront._hear
async def patient(front, limit_s):
    while (found := await hear(front, limit_s)) is None:
        status = pathlib.Path(f"/proc/{front._process.pid}/stat").read_text()
        if status.rpartition(")")[2].split()[0] == "T":
            return None
    return found
WatchedFront._hear = patient
"""
"""A front that was stopped is found soon, and no other one, however busy the machine is."""


def test_a_front_that_hangs_is_replaced_and_the_other_serves_on(short_tmp: Path) -> None:
    asked = {**LONG, "stream": False, "max_tokens": 3}
    with serving(short_tmp, code=PATIENT_FRONTS + HUNG_SOON + TWO_FRONTS, is_forked=True) as server:
        url = wait_until_up(server)
        first = fronts_of(server)
        with streams_on_both(url, first) as streams:
            victim = streams[-1][0]
            os.kill(victim, signal.SIGSTOP)
            ends = [(front == victim, last_line(lines)) for front, lines in streams]
        assert set(ends) == {(True, "cut"), (False, "data: [DONE]")}
        wait_for(lambda: len(fronts_of(server) - {victim}) == 2, "another front")
        wait_until_counted(url, "vllm:num_requests_running", 0)
        wait_until_counted(url, "vllm:kv_cache_usage_perc", 0)
        for _ in range(MANY):
            assert post(f"{url}{CHAT}", json=asked).status_code == 200
        server.process.terminate()
        assert server.end() == 0
    assert server.text.count("hangs and is killed") == 1
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("says", ["", "printf .; "], ids=["before it listens", "after"])
def test_a_front_that_says_nothing_is_replaced(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(listener: socket.socket) -> None:
        command = ("sh", "-c", f"{says}exec sleep 600")
        monkeypatch.setattr(watched_front, "FRONT_COMMAND", command)
        monkeypatch.setattr(watched_front, "START_S", 600.0 if says else 0.2)
        owner = fronts.Fronts(
            tmp_path, [listener], {}, ServerSettings(), hang_limit_s=0.2 if says else 600.0
        )
        running = asyncio.create_task(owner.run())
        while owner._next_number < 3:
            await asyncio.sleep(0.01)
        await owner.stop()
        await running

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))
    assert "front process 1 hangs" in caplog.text


HEARTBEATS = (
    sys.executable, "-S", "-E", "-c",
    "import os, select\n"
    "while os.write(1, b'.') and (not select.select([0], [], [], 0.05)[0] or os.read(0, 65536)):\n"
    "    pass",
)  # fmt: skip
"""A front that starts no process for each beat, which a busy disk would hold up. It ends with its
standard input."""


def test_sleep_of_the_owner_does_not_count_against_a_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(listener: socket.socket) -> None:
        monkeypatch.setattr(watched_front, "FRONT_COMMAND", HEARTBEATS)
        heard = asyncio.Event()
        owner = fronts.Fronts(
            tmp_path, [listener], {}, ServerSettings(),
            on_listening=lambda _: heard.set(), hang_limit_s=2.0,
        )  # fmt: skip
        running = asyncio.create_task(owner.run())
        await heard.wait()
        for _ in range(2):
            time.sleep(3.0)  # the loop stands still, with all in it
            for _ in range(10):
                await asyncio.sleep(0.01)
        assert owner._next_number == 2
        await owner.stop()
        await running

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))
    assert "hangs" not in caplog.text


def test_fronts_end_with_a_killed_owner(short_tmp: Path) -> None:
    with serving(short_tmp, code=TWO_FRONTS, is_forked=True) as server:
        wait_until_up(server)
        processes = [Path(f"/proc/{child}") for child in children(server.process.pid)]
        server.process.kill()
        wait_for(lambda: not any(path.exists() for path in processes), "end of all")


def test_a_model_that_is_not_there_is_a_failure(short_tmp: Path) -> None:
    code = TWO_FRONTS.replace("max_model_len=2048", "model='/no/such/model'")
    with serving(short_tmp, code=code, is_forked=True) as server:
        assert server.end() == 1
    assert "ConfigError" in server.text and "/no/such/model" in server.text
    assert list(short_tmp.iterdir()) == []


def reading(finished: int, waiting: int) -> FrontReading:
    metrics = ServerMetrics()
    for _ in range(finished):
        metrics.count_finish("stop")
        metrics.count_http("/x", "GET", 200, 0.003)
    metrics.num_open_requests = waiting
    return FrontReading(metrics, waiting, 10 * waiting, {"tokens": finished})


def test_counters_of_a_front_outlive_it_and_gauges_do_not(tmp_path: Path) -> None:
    board = FrontBoard(tmp_path)
    board.write(1, reading(2, 1))
    board.write(2, reading(3, 4))
    own = reading(5, 0)
    total = board.total(own, 1)  # the file of front 1 is older than `own`
    assert total.metrics.finished == {"stop": 8} and total.refused == {"tokens": 8}
    assert (total.num_waiting_requests, total.num_waiting_tokens) == (4, 40)
    assert total.metrics.http == {("/x", "GET", "2xx"): 8}
    seconds = total.metrics.http_seconds["/x"]
    assert sum(seconds.counts) == 8 and seconds.total == pytest.approx(0.024)
    assert seconds.bounds == LATENCY_BOUNDS
    assert own.metrics.finished == {"stop": 5} and sum(own.metrics.http_seconds["/x"].counts) == 5
    board.retire(2)
    board.retire(7)  # one that never wrote
    after = board.total()
    assert after.metrics.finished == {"stop": 5}
    assert (after.num_waiting_requests, after.metrics.num_open_requests) == (1, 1)


def test_restarts_of_the_core_leave_the_board_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the files of an older core are removed, and those of the front of that number."""
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 1.0)
    board = FrontBoard(tmp_path)
    for number in range(4):
        board.write(number, reading(1, 0))
        mark_ready(tmp_path, number)
        write_failure(tmp_path, number, StartFailure(is_config=False, message="x"))

    async def work() -> None:
        owner = supervisor.EngineSupervisor(
            tmp_path,
            {},
            on_dead=lambda _: None,
            flight_dir=tmp_path / "flight",
            command=("true",),
            restart_policy=supervisor.RestartPolicy(first_delay_s=0.0, max_failed_starts=1),
        )
        running = asyncio.create_task(owner.run())
        while (tmp_path / "ready-2").exists():
            await asyncio.sleep(0.01)
        await owner.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert board.total().metrics.finished == {"stop": 4}
    assert not any((tmp_path / f"failure-{number}").exists() for number in (0, 1, 2))


class Flaky:
    """A board on a full disk, and the services that write on it."""

    settings = ServerSettings()

    def __init__(self) -> None:
        self.num_shown = 0
        self.backend = self
        self.client = None

    def show(self) -> None:
        self.num_shown += 1
        if self.num_shown == 1:
            raise OSError(28, "No space left on device")

    def retire(self, _: int) -> None:
        raise OSError(28, "No space left on device")


def test_a_reading_that_cannot_be_written_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "TICK_S", 0.01)
    services: Any = Flaky()

    async def work() -> None:
        ticking = asyncio.create_task(app._tick(services))
        while services.num_shown < 3:
            await asyncio.sleep(0.01)
            assert not ticking.done()
        ticking.cancel()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert "No space left" in caplog.text


SLEEPER = ("sh", "-c", "exec cat > $0")
"""A front that writes down what it is told, until its standard input ends."""


def fronts_of_sleepers(
    directory: Path, told: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> fronts.Fronts:
    monkeypatch.setattr(watched_front, "FRONT_COMMAND", (*SLEEPER, str(told)))
    return fronts.Fronts(directory, [listener], {}, ServerSettings())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_front_is_told_to_drain_even_if_it_was_being_started(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"

    async def work(listener: socket.socket) -> None:
        owner = fronts_of_sleepers(tmp_path, told, monkeypatch, listener)
        running = asyncio.create_task(owner.run())
        if is_late:
            while not (told.exists() and told.stat().st_size):
                await asyncio.sleep(0.01)
        else:
            while owner._next_number == 1:  # then it is being spawned
                await asyncio.sleep(0)
        owner.drain()
        while not (told.exists() and told.read_bytes().endswith(b"d")):
            await asyncio.sleep(0.01)
        await owner.stop()
        await running

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))


@pytest.mark.parametrize("is_another", [False, True], ids=["first", "replacement"])
def test_a_front_that_is_being_started_does_not_outlive_stop(
    is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: `stop` did not know of it, so that it was left behind. It listens to nobody here."""
    before = set(children(os.getpid()))

    def started() -> set[str]:
        """Children that were not there before, some of which may end meanwhile."""
        return set(children(os.getpid())) - before

    async def work(listener: socket.socket) -> None:
        monkeypatch.setattr(watched_front, "FRONT_COMMAND", ("sleep", "600"))
        owner = fronts.Fronts(tmp_path, [listener], {}, ServerSettings())
        running = asyncio.create_task(owner.run())
        if is_another:
            while not owner._fronts:
                await asyncio.sleep(0)
            await owner._fronts[1].kill()
        while owner._next_number == 1 + is_another:  # then one is being spawned
            await asyncio.sleep(0)
        assert owner._fronts.keys() == set()
        assert started()
        await owner.stop()
        assert not started()
        await running

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))


@pytest.mark.parametrize("how", [fronts.Fronts.stop, fronts.Fronts.drain])
def test_no_front_is_started_late_after_the_end(
    how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the wait before the next start was waited for."""

    async def work(listener: socket.socket) -> None:
        monkeypatch.setattr(watched_front, "FRONT_COMMAND", ("true",))
        policy = supervisor.RestartPolicy(first_delay_s=600, max_delay_s=600)
        owner = fronts.Fronts(tmp_path, [listener], {}, ServerSettings(), policy)
        running = asyncio.create_task(owner.run())
        while caplog.text.count("is replaced") < 2:  # then it waits
            await asyncio.sleep(0)
        ending = how(owner)
        if ending is not None:
            await ending
        await running
        assert owner._next_number == 3

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))


def test_a_full_disk_does_not_end_the_fronts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = tmp_path / "told"

    async def work(listener: socket.socket) -> None:
        owner = fronts_of_sleepers(tmp_path, told, monkeypatch, listener)
        board: Any = Flaky()
        owner.board = board
        running = asyncio.create_task(owner.run())
        while not told.exists():
            await asyncio.sleep(0.01)
        await owner.stop()
        await running

    with socket.socket() as listener:
        asyncio.run(asyncio.wait_for(work(listener), WAIT_S))
    assert "front process 1" in caplog.text and "No space left" in caplog.text


def test_each_front_has_its_part_of_the_queue() -> None:
    room = WaitingRoom(Limits(max_queue_requests=5, max_queue_tokens=100), num_fronts=2)
    places = [room.enter(Party()) for _ in range(3)]
    with pytest.raises(RefusedError, match="no more than 3 requests may wait"):
        room.enter(Party())
    places[0].hold(50)
    with pytest.raises(RefusedError, match="no more than 50 tokens may wait"):
        places[1].hold(1)


def test_a_port_in_use_is_found_although_fronts_share_it() -> None:
    with listening(ServerSettings(port=0, api_server_count=3)) as sockets:
        ports = {listener.getsockname()[1] for listener in sockets}
        assert len(sockets) == 3 and len(ports) == 1
        taken = ServerSettings(port=ports.pop(), api_server_count=2)
        with pytest.raises(ConfigError, match="Cannot listen"), listening(taken):
            pass


def test_a_front_is_there_when_it_can_serve(tmp_path: Path) -> None:
    """Turns red when the server calls itself ready while one of its fronts, which has the model but
    no word of the engine yet, still refuses requests."""
    backend, board, client = Backend(), FrontBoard(tmp_path), InMemoryClient()
    services = Services(ServerSettings(), backend, board, 1)
    client.state = EngineState.STARTING
    backend.serve(client)
    no_text: Any = None
    backend.set_model(ServedModel(("name",), "root", 0, no_text))
    services.show()
    assert not board.has(1)
    client.state = EngineState.READY
    services.show()
    assert board.has(1)
    asyncio.run(services.close())
