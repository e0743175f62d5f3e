"""The page: its files, who may read what, and the snapshots that it shows."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base.errors import ConfigError
from quire.engine.model_front import ModelFront
from quire.protocol.control import AdminOp, Inspect, MapBlocks, Report
from quire.protocol.status import EngineStatus
from quire.server.readings.page_recorder import PageRecorder
from quire.server.readings.timeline import Timeline, TimelineLog
from quire.server.routes import live
from quire.server.routes.live import NUM_OPEN, EngineLook, difference, request_rows, run_lengths
from quire.server.routes.page import FILES
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import RunningServer, running_server

KEY = "the-key-of-the-page-0123456789"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True}
PATHS = ["/ui", *(f"/ui/{name}" for name in FILES if name != "index.html")]
DATA = ("/ui/api/snapshot", "/ui/api/stream")


@pytest.fixture(scope="module")
def guarded(front: ModelFront) -> Iterator[RunningServer]:
    with running_server(
        front, ServerSettings(api_key=(KEY,), disable_access_log=True, root_path="/llm")
    ) as found:
        yield found


def test_the_root_leads_to_the_page(guarded: RunningServer) -> None:
    with waiting.PatientClient(base_url=guarded.url) as http:
        for path in ("/", "/llm", "/llm/"):
            reply = http.get(path)
            assert reply.status_code == 307 and reply.headers["location"] == "/llm/ui"
        assert http.get("/llm/ui/").headers["content-type"].startswith("text/html")
        assert '"/llm/ui/app.js"' in http.get("/ui").text, "links are below the root path"


@pytest.mark.parametrize("path", PATHS)
def test_files_are_public_typed_and_tagged(guarded: RunningServer, path: str) -> None:
    """Fault: a browser sniffs a type, loads from elsewhere, or gets a file again that it has."""
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    with waiting.PatientClient(base_url=guarded.url) as http:
        reply = http.get(path)
        assert reply.status_code == 200 and reply.content
        kind = kinds.get(path.rpartition(".")[2], "text/html")
        assert reply.headers["content-type"].partition(";")[0] == kind
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'") and "unsafe" not in policy
        assert "data:" not in policy and "*" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert http.head(path).headers["etag"] == reply.headers["etag"]
        same = http.get(path, headers={"if-none-match": reply.headers["etag"]})
        assert same.status_code == 304 and not same.content
        assert http.get(path, headers={"if-none-match": '"other"'}).status_code == 200
        assert http.post(path).status_code == 405


def test_the_page_is_small_and_names_no_other_host(guarded: RunningServer) -> None:
    with waiting.PatientClient(base_url=guarded.url) as http:
        texts = [http.get(path).text for path in PATHS]
    assert sum(map(len, texts)) < 200_000
    for text in texts:
        known = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in known and "https://" not in known
    assert "style=" not in texts[0] and "<script>" not in texts[0], "the policy forbids them"


@pytest.mark.parametrize("path", DATA)
def test_data_wants_the_key(guarded: RunningServer, path: str) -> None:
    with waiting.PatientClient(base_url=guarded.url) as http:
        assert http.get(path).status_code == 401
        assert http.get(f"{path}?api_key={KEY}").status_code == 401
        assert http.get(path, headers={"cookie": f"key={KEY}"}).status_code == 401
        with http.stream("GET", path, headers=WITH_KEY) as reply:
            assert reply.status_code == 200 and "set-cookie" not in reply.headers


def test_a_file_that_is_not_there(http: httpx.Client) -> None:
    for path in ("/ui/none.js", "/ui/../settings.py", "/ui/%2e%2e/settings.py"):
        assert http.get(path).status_code == 404


def test_the_page_can_be_turned_off(front: ModelFront) -> None:
    settings = ServerSettings(ui=False, disable_access_log=True)
    with (
        running_server(front, settings) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        for path in ("/", *PATHS, *DATA):
            reply = http.get(path)
            assert reply.status_code == 404
            assert "--ui" in reply.json()["error"]["message"]


@pytest.fixture
def maps_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look ask for a map, also if the last one took long on a busy machine."""
    monkeypatch.setattr(live, "MAP_SHARE", math.inf)


@pytest.mark.usefixtures("maps_are_due")
def test_a_snapshot_agrees_with_the_metrics(server: RunningServer, http: httpx.Client) -> None:
    """Fault: the page shows other figures than /metrics, or a request nowhere."""
    assert http.post(CHAT, json={**BODY, "request_id": "shown"}).status_code == 200
    server.wait_until_idle()
    shown = http.get("/ui/api/snapshot").json()
    text = http.get("/metrics").text
    stats = shown["engine"]
    for name, value in (
        ("quire:kv_blocks", stats["num_blocks"]),
        ("quire:kv_blocks_cached", stats["num_cached_blocks"]),
        ("vllm:generation_tokens_total", shown["front"]["generation_tokens"]),
        ("vllm:time_to_first_token_seconds_count", sum(shown["latency"]["ttft"]["counts"])),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert float(line.rpartition(" ")[2]) == value, name
    counts = letters(shown["blocks"])
    assert sum(counts.values()) == stats["num_blocks"]
    assert counts["c"] == stats["num_cached_blocks"] and not counts["u"]
    (row,) = [row for row in shown["requests"].values() if row["id"] == "shown"]
    assert row["tokens"] == 8 and row["reason"] == "length"
    assert 0 <= row["queued"] <= row["scheduled"] <= row["first_token"] <= row["finished"]


def test_several_viewers_cost_what_one_costs() -> None:
    """Fault: each viewer of a key has the engine asked, or rows and differences made, again."""
    look = EngineLook()
    reading: dict[str, Any] = {"a": 1}
    assert look.frame(reading, "key") is None
    look.keep_frame(reading, "key", {**reading, "b": 2})
    frame = look.frame(reading, "key")
    assert frame is not None and frame == {"a": 1, "b": 2} and look.frame(reading, "key") is frame
    assert look.frame(reading, "another") is None, "it has other requests"
    old = {"a": 1, "b": 1}
    assert look.patch(old, frame) == b'{"b":2}' and look.patch(old, frame) is look.patch(old, frame)
    assert look.patch({"a": 1}, frame) == b'{"b":2}' and look.patch(dict(frame), frame) == b"{}"
    newer = dict(reading)
    assert look.frame(newer, "key") is None, "a frame is of its own reading"


@pytest.mark.usefixtures("maps_are_due")
def test_nothing_is_gathered_while_nobody_looks(front: ModelFront) -> None:
    """Fault: the engine is asked for its blocks though no page is open."""
    client = InMemoryClient()
    asked: list[AdminOp] = []
    answer = client.control

    async def control(op: AdminOp) -> Report:
        asked.append(op)
        return await answer(op)

    client.control = control  # type: ignore[method-assign]
    with (
        running_server(front, client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        assert http.post(CHAT, json=BODY).status_code == 200
        assert http.get("/metrics").status_code == 200 and not asked
        http.get("/ui/api/snapshot")
        assert [type(op) for op in asked] == [Inspect, MapBlocks]
        waiting.wait_for(
            lambda: bool(http.get("/ui/api/snapshot")) and len(asked) > 2, "second map"
        )
        assert [type(op) for op in asked] == [Inspect, MapBlocks, MapBlocks], "the plan stays"
    client.engine.core.shutdown()


class SlowMaps(InMemoryClient):
    """A core whose maps say that they took an hour."""

    num_maps = num_restarts = 0

    @property
    def status(self) -> EngineStatus:
        return replace(super().status, restarts=self.num_restarts)

    async def control(self, op: AdminOp) -> Report:
        report = await super().control(op)
        if report.view is None:
            return report
        self.num_maps += 1
        return replace(report, view=replace(report.view, took_s=3600.0))


def test_a_map_that_takes_long_comes_less_often(
    front: ModelFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: viewers of an engine with many blocks or requests slow its steps, or one slow map
    stays for hours, even when its core is dead."""
    client = SlowMaps()
    with (
        running_server(front, client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):

        def look() -> Any:
            return http.get("/ui/api/snapshot").json()

        first, later = look(), look()
        assert later["blocks"] == first["blocks"] and later["at"] > first["at"]
        assert client.num_maps == 1
        client.num_restarts = 1
        waiting.wait_for(lambda: bool(look()) and client.num_maps == 2, "the new core's map")
        look()
        assert client.num_maps == 2
        monkeypatch.setattr(live, "RAREST_MAP_S", 0.0)
        waiting.wait_for(lambda: bool(look()) and client.num_maps > 2, "the next map")
    client.engine.core.shutdown()


@pytest.mark.usefixtures("maps_are_due")
def test_steps_that_take_long_are_shown(front: ModelFront) -> None:
    """Fault: a step that takes longer than two looks are apart is in none of them."""
    client = InMemoryClient(step_s=1.0)
    shown: dict[str, list[float]] = {}
    with (
        running_server(front, client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        http.get("/ui/api/snapshot")
        answer = pool.submit(http.post, CHAT, json={**BODY, "max_tokens": 3})
        while not answer.done():
            shown |= http.get("/ui/api/snapshot").json()["steps"]
            time.sleep(0.2)
        assert answer.result().status_code == 200
        shown |= http.get("/ui/api/snapshot").json()["steps"]
    assert sum(decode for _, decode, *_ in shown.values()) == 2, "the first is of the prompt"
    client.engine.core.shutdown()


def letters(runs: str) -> Counter[str]:
    """Return how many blocks are in each state."""
    found: Counter[str] = Counter()
    for letter, length in re.findall(r"([a-z])(\d+)", runs):
        found[letter] += int(length)
    return found


def test_requests_of_others_are_not_shown(front: ModelFront) -> None:
    """Fault: the holder of one key sees requests, or settings, through the page."""
    keys = (KEY, "another-key-0123456789")
    with (
        running_server(front, ServerSettings(api_key=keys, disable_access_log=True)) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        assert http.post(CHAT, json=BODY, headers={"x-api-key": keys[1]}).status_code == 200
        own, other = (
            http.get("/ui/api/snapshot", headers={"x-api-key": key}).json() for key in keys
        )
        assert not own["requests"] and len(other["requests"]) == 1
        assert not own["settings"] and keys[1] not in json.dumps(own)
        assert own["model"]["names"] and "root" not in own["model"], "a folder is a setting too"


@pytest.mark.usefixtures("maps_are_due")
def test_owners_of_blocks_are_named_to_their_own_key(front: ModelFront) -> None:
    """Fault: the holder of one key learns ids of another's requests from the map, or a waiting
    request has no reason."""
    keys = (KEY, "another-key-0123456789")
    client = InMemoryClient(step_s=0.1, max_num_seqs=1)
    settings = ServerSettings(api_key=keys, disable_access_log=True)
    with (
        running_server(front, settings, client) as server,
        waiting.PatientClient(base_url=server.url) as http,
        http.stream(
            "POST",
            CHAT,
            json={**BODY, "max_tokens": 400, "stream": True, "request_id": "first"},
            headers={"x-api-key": keys[0]},
        ) as first,
    ):
        lines = first.iter_lines()  # to drop it would end the request
        next(lines)
        second = {**BODY, "max_tokens": 4, "request_id": "second"}
        with futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(http.post, CHAT, json=second, headers={"x-api-key": keys[1]})
            server.wait_until_open(2)

            def looked_at() -> list[dict[str, Any]]:
                """Both keys' views, once a step has looked at the second request."""
                found = [
                    http.get("/ui/api/snapshot", headers={"x-api-key": key}).json() for key in keys
                ]
                return found if "max_num_seqs" in json.dumps(found[0]["groups"]) else []

            own, other = waiting.wait_for(looked_at, "a reason to wait")
            first.close()
            assert done.result().status_code == 200
        server.wait_until_idle()
    client.engine.core.shutdown()
    running, queued = own["groups"].values()
    assert running["id"] == "first" and running["blocks"] > 0 and "waits" not in running
    assert "id" not in queued and "max_num_seqs" in queued["waits"]
    assert [each.get("id") for each in other["groups"].values()] == [None, "second"]
    owned = sum(int(run.split("x")[1]) for run in own["owners"].split(",") if run[0] != "0")
    assert owned == running["blocks"] == own["engine"]["num_used_blocks"]


@pytest.mark.usefixtures("maps_are_due")
def test_steps_keep_their_times(server: RunningServer, http: httpx.Client) -> None:
    """Fault: each event sends all steps again, since their times move."""
    http.get("/ui/api/snapshot")
    assert http.post(CHAT, json=BODY).status_code == 200
    server.wait_until_idle()
    one, other = (http.get("/ui/api/snapshot").json()["steps"] for _ in range(2))
    assert one and one == other
    assert sum(row[1] for row in one.values()) >= 7, "tokens behind the prompt"
    assert sum(row[2] for row in one.values()) > 0, "tokens of the prompt"


def test_a_long_queue_makes_no_long_snapshot() -> None:
    """Fault: each event costs as much as there are requests, or the longest wait is not shown."""
    log = TimelineLog(8)
    for i in range(5000):
        log.begin(Timeline(f"r{i}", CHAT))
    numbers = [int(number) for number in request_rows(log, "")]
    assert numbers == [*range(1, NUM_OPEN + 1), *range(5001 - NUM_OPEN, 5001)]
    assert not request_rows(log, "another")


@pytest.mark.parametrize("count", [1, NUM_OPEN - 1, NUM_OPEN + 1, 2 * NUM_OPEN])
def test_a_short_queue_is_shown_whole(count: int) -> None:
    log = TimelineLog(8)
    for i in range(count):
        log.begin(Timeline(f"r{i}", CHAT))
    assert list(request_rows(log, "")) == [str(i + 1) for i in range(count)]


def test_a_long_answer_is_counted_while_it_grows() -> None:
    """Fault: the tokens of an open request stand still once its timeline keeps no more chunks."""
    log = TimelineLog(8)
    log.begin(timeline := Timeline("long", CHAT))
    for _ in range(3000):
        timeline.add_chunk(2)
    assert request_rows(log, "")["1"]["tokens"] == 6000


def test_a_stream_tells_differences(server: RunningServer, http: httpx.Client) -> None:
    """Fault: the state that a page puts together is not the server's."""
    with http.stream("GET", "/ui/api/stream") as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        shown: dict[str, Any] = json.loads(next(lines)[6:])
        settings = shown["settings"]
        assert waiting.post(server.url + CHAT, json=BODY).status_code == 200
        server.wait_until_idle()
        total = server.client.stats.prompt_tokens_total

        def is_current() -> bool:
            rows = shown["requests"].values()
            is_counted = shown["engine"]["prompt_tokens_total"] == total
            return is_counted and any(row["tokens"] == 8 for row in rows)

        while not is_current():  # else the test's own limit ends it
            change = json.loads(next(lines)[6:])
            assert "settings" not in change and "plan" not in change
            shown = merged(shown, change)
    assert shown["settings"] == settings


@pytest.mark.usefixtures("maps_are_due")
def test_a_recording_is_what_the_page_shows(front: ModelFront, tmp_path: Path) -> None:
    """Fault: a recording lacks what a viewer sees, or the requests of some keys."""
    path = tmp_path / "engine.jsonl"
    path.write_text("an older one")
    keys = (KEY, "another-key-0123456789")
    settings = ServerSettings(api_key=keys, record_ui=str(path), disable_access_log=True)
    with (
        running_server(front, settings) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        for i, key in enumerate(keys):
            body = {**BODY, "request_id": f"of-{i}"}
            assert http.post(CHAT, json=body, headers={"x-api-key": key}).status_code == 200
        server.wait_until_idle()
        names = {"of-0", "of-1"}

        def recorded() -> dict[str, Any]:
            shown: dict[str, Any] = {}
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    shown = merged(shown, json.loads(line))
            return shown

        def has_all() -> bool:
            rows = recorded().get("requests", {}).values()
            return {row["id"] for row in rows if "finished" in row} == names

        waiting.wait_for(has_all, "end of the requests in the recording")
        now = http.get("/ui/api/snapshot", headers={"x-api-key": KEY}).json()
        waiting.wait_for(lambda: recorded()["blocks"] == now["blocks"], "the map of the end")
    shown = recorded()
    assert shown["front"]["generation_tokens"] == now["front"]["generation_tokens"] == 16
    assert shown["blocks"] == now["blocks"] and not shown["settings"]


def test_a_recording_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_ui"):
        PageRecorder(str(tmp_path))
    recorder = PageRecorder("")
    assert not recorder.is_open
    recorder.add({"a": 1})
    small = PageRecorder(str(tmp_path / "small"), max_bytes=20)
    small.add({"a": 1})
    small.add({"b": "x" * 20})
    assert not small.is_open, "it is full"
    small.add({"c": 1})
    assert (tmp_path / "small").read_text() == '{"a":1}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = PageRecorder(str(path))
    recorder.add({"a": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        recorder.add({"b": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not recorder.is_open
    assert path.read_text() == '{"a":1}\n'


def merged(value: Any, change: Any) -> Any:
    """Return `value` after a merge patch, as RFC 7396 has it."""
    if not isinstance(change, dict):
        return change
    found = dict(value) if isinstance(value, dict) else {}
    for name, each in change.items():
        if each is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), each)
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"a": 1}),
        ({"a": 1, "b": {"c": [1], "d": 2}}, {"b": {"c": [2], "e": {}}}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"a": 1}, {"a": {"b": {"c": 1}}}),
    ],
    ids=str,
)
def test_a_difference_makes_the_new_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, difference(old, new)) == new
    assert difference(new, new) == {}


def test_runs_of_letters() -> None:
    assert run_lengths(b"ffuuucf") == "f2u3c1f1" and run_lengths(b"") == ""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_modules_without_a_browser() -> None:
    """Fault: markdown that runs or stalls, wrong arithmetic, a lost branch. See the file."""
    file = Path(__file__).with_name("page_modules.mjs")
    done = subprocess.run(
        ["node", "--test", str(file)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
