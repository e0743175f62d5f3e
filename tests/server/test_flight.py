"""Dumps of the flight recorder from a server, by its route and by a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from quire.base.telemetry.flight.dump import FlightDump, decode_dump, user_folder
from quire.base.telemetry.flight.record import Doing, EventKind, read_record
from quire.engine.model_front import ModelFront
from quire.server.settings import ServerSettings
from tests.server.fake_serve import FakeServeOptions, FakeServer, fake_server
from tests.server.load import until_ready
from tests.server.running import RunningServer, running_server
from tests.server.test_fronts import TWO_FRONTS, fronts_of, wait_until_up
from tests.server.test_run import serving
from tests.waiting import get, in_a_loop, post, wait_for

PATH = "/debug/flight"
KEY = "k" * 16
BODY = {"prompt": "Once upon a time", "max_tokens": 4, "request_id": "the-one"}


def written(directory: Path) -> FlightDump:
    """Wait for the dump of a signal under a folder for temporary files."""
    pattern = f"quire-flight-{os.getuid()}/flight-*-signal-*.bin"
    files = wait_for(lambda: list(directory.glob(pattern)), "dump")
    return decode_dump(files[0].read_bytes())


def test_the_route_is_closed_without_the_switch_and_without_a_key(
    server: RunningServer, front: ModelFront
) -> None:
    closed = get(server.url + PATH)
    assert closed.status_code == 404 and "--enable-engine-control" in closed.text
    settings = ServerSettings(enable_engine_control=True, api_key=(KEY,), disable_access_log=True)
    with running_server(front, settings) as controlled:
        assert get(controlled.url + PATH).status_code == 401
        reply = get(controlled.url + PATH, headers={"x-api-key": KEY})
        schema = get(controlled.url + "/openapi.json", headers={"x-api-key": KEY}).json()
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/octet-stream"
    dump = decode_dump(reply.content)
    assert dump.reason == "route: GET /debug/flight"
    assert [each.name for each in dump.stacks] == ["server"]
    content = schema["paths"][PATH]["get"]["responses"]["200"]["content"]
    assert list(content) == ["application/octet-stream"]


def url_of(server: FakeServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def stack_of_core(url: str) -> str:
    """A busy machine may leave a core less time to write it than a dump waits."""
    dump = decode_dump(get(url + PATH).content)
    (of_core,) = [each for each in dump.stacks if each.name == "core"]
    return of_core.text


@in_a_loop
async def test_a_core_that_is_stopped_is_shown_too() -> None:
    """Nobody asks the core: its ring is read as it left it."""
    with fake_server(FakeServeOptions(enable_engine_control=True), is_forked=True) as server:
        await until_ready(server.port)
        assert post(url_of(server) + "/v1/completions", json=BODY).status_code == 200
        (core,) = server.descendants()
        os.kill(core, signal.SIGSTOP)
        dump = decode_dump(get(url_of(server) + PATH).content)
        os.kill(core, signal.SIGCONT)
        wait_for(lambda: "in _run" in stack_of_core(url_of(server)), "stack of the core")
    (ring,) = dump.rings
    record = read_record(ring)
    assert record.pid == core and record.doing in (Doing.IDLE, Doing.BETWEEN_STEPS)
    events = [(event.kind, event.text) for event in record.events]
    assert (EventKind.ADDED, "the-one") in events
    assert sum(step.ended.tokens for step in record.steps) == 4
    (of_core,) = [each for each in dump.stacks if each.name == "core"]
    assert of_core.pid == core and of_core.text.startswith("it wrote none")


@in_a_loop
async def test_a_signal_writes_a_dump_and_the_server_goes_on() -> None:
    with fake_server(FakeServeOptions(), is_forked=True) as server:
        await until_ready(server.port)
        server.process.send_signal(signal.SIGUSR1)
        dump = written(server.directory)
        assert dump.reason == "signal: SIGUSR1"
        assert [each.name for each in dump.stacks] == ["server", "core"]
        assert len(dump.rings) == 1
        assert post(url_of(server) + "/v1/completions", json=BODY).status_code == 200
        assert server.process.poll() is None


PATIENT_DUMPS = """
from quire.base.telemetry.flight import dump, stacks
gather = stacks.gather_stacks
dump.gather_stacks = lambda directories: gather(directories, 60.0)
"""


def test_a_dump_has_the_stacks_of_all_fronts(short_tmp: Path) -> None:
    with serving(short_tmp, code=PATIENT_DUMPS + TWO_FRONTS, is_forked=True) as server:
        wait_until_up(server)
        fronts = fronts_of(server)
        server.process.send_signal(signal.SIGUSR1)
        dump = written(short_tmp)
    names = {each.name: each for each in dump.stacks}
    assert set(names) == {"server", "core", "front 1", "front 2"}
    assert {names["front 1"].pid, names["front 2"].pid} == fronts
    assert "front_process.py" in names["front 2"].text


def test_dumps_are_kept_in_the_data_folder(tmp_path: Path) -> None:
    assert ServerSettings(data_dir=str(tmp_path)).flight_dir == tmp_path / "flight"
    assert ServerSettings().flight_dir == user_folder()
