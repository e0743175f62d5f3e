"""Files of requests: answered in order, taken up after a kill, and bad lines fail alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, EngineError, EngineUnavailableError
from quire.engine.clients.async_client import UpdateStream
from quire.protocol import EngineRequest
from quire.protocol.status import EngineState
from quire.server.app import create_app
from quire.server.batches.lines import read_line
from quire.server.batches.runner import BatchCounts, BatchFiles, BatchRunner, LineRules
from quire.server.generation.backend import Backend, ServedModel
from quire.server.generation.served_model import model_dialect
from quire.server.processes.batch_run import BATCH_LIMITS
from quire.server.settings import ServerSettings
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, bundled_front
from tests.waiting import WAIT_S

MESSAGES = [{"role": "user", "content": "hi"}]


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    given = body or {"messages": MESSAGES, "max_tokens": 4, "seed": 1, "model": MODEL}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": given})


def run(
    client: InMemoryClient,
    source: Path,
    target: Path,
    stop_after: int | None = None,
    *,
    max_together: int = 3,
    faults: Callable[[InMemoryClient], Coroutine[Any, Any, None]] | None = None,
) -> BatchCounts | None:
    """Run a file with an engine in memory. stop_after: lines after which the run is cancelled, as
    with Ctrl-C; then return None. faults: faults of the engine meanwhile."""

    async def work() -> BatchCounts | None:
        front = bundled_front()
        backend = Backend()
        backend.serve(client)
        backend.set_model(
            ServedModel((MODEL,), MODEL, 1_700_000_000, front, 0, model_dialect(front))
        )
        app = create_app(ServerSettings(limits=BATCH_LIMITS), backend)
        num_done = 0
        stopped = asyncio.Event()

        def on_line() -> None:
            nonlocal num_done
            num_done += 1
            if num_done == stop_after:
                stopped.set()

        files = BatchFiles(source, target)
        runner = BatchRunner(app, backend, files, LineRules(2**20), max_together=max_together)
        running = asyncio.create_task(runner.run(on_line))
        failing = None if faults is None else asyncio.create_task(faults(client))
        stopping = asyncio.create_task(stopped.wait())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if failing is not None:
            await failing
        if not running.done():
            running.cancel()
            await asyncio.wait((running,))
            return None
        return running.result()

    return asyncio.run(work())


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_each_kind_is_answered_in_order(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("chat"),
        line("text", "/v1/completions", prompt="One", max_tokens=3),
        line("vector", "/v1/embeddings", input="One"),
        line("response", "/v1/responses", input="hi", max_output_tokens=3),
        line("message", "/v1/messages", model=MODEL, messages=MESSAGES, max_tokens=3),
    ]
    source.write_text("\n\n".join(lines) + "\n", encoding="utf-8-sig")  # as editors may write it
    counts = run(InMemoryClient(), source, target)
    assert counts == BatchCounts(num_lines=5)
    found = answers(target)
    assert [each["custom_id"] for each in found] == [
        "chat", "text", "vector", "response", "message",
    ]  # fmt: skip
    assert all(each["response"]["status_code"] == 200 for each in found)
    assert all(each["error"] is None and each["response"]["request_id"] for each in found)
    assert found[0]["response"]["body"]["object"] == "chat.completion"
    assert not list(tmp_path.glob("*.partial*"))


def test_bad_lines_fail_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {
        "no JSON": "{",
        "no id": json.dumps({"url": "/v1/completions", "body": {}}),
        "twice": line("good"),
        "streams": line("s", messages=MESSAGES, stream=True),
        "would be asked for again until it is met": line("d", messages=MESSAGES, deadline_s=1),
        "elsewhere": line("e", "/metrics"),
    }
    refused = line("refused", messages=MESSAGES, temperature=-1)
    source.write_text("\n".join([line("good"), *bad.values(), refused]))
    counts = run(InMemoryClient(), source, target)
    assert counts == BatchCounts(num_lines=8, num_failed=7)
    good, *others, last = answers(target)
    assert good["response"]["status_code"] == 200
    for each in others:
        assert each["response"] is None and each["error"]["message"]
    assert last["response"]["status_code"] == 400
    assert "temperature" in last["response"]["body"]["error"]["message"]


def test_a_line_is_bounded_before_it_is_decoded() -> None:
    """Fault: a line of an uploaded file was decoded whole, past all bounds of a body."""
    values = "[" + ",".join(["[]"] * 300_000) + "]"
    text = f'{{"custom_id": "a", "url": "/v1/completions", "body": {{"prompt": {values}}}}}'
    tracemalloc.start()
    found = read_line(text.encode(), set(), len(text))
    long = read_line(text.encode(), set(), len(text) - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not found.fault and found.body == f'{{"prompt": {values}}}'.encode()
    assert "max_body_bytes" in long.fault and not long.body
    assert peak < 4 * len(text), f"{peak} bytes"


@pytest.mark.parametrize("name", ["stream", "background", "deadline_s"])
def test_what_a_batch_has_not_is_refused(name: str) -> None:
    def fault(value: str) -> str:
        body = f'{{"{name}": {value}}}'
        text = f'{{"custom_id": "a", "url": "/v1/completions", "body": {body}}}'
        return read_line(text.encode(), set(), 1000).fault

    assert name in fault("1") and name in fault("[true]")
    assert not fault("null")
    assert bool(fault("false")) is (name == "deadline_s")


@pytest.mark.parametrize("torn", [b"", b'0123456789abcdef {"id": "ba'])
def test_a_run_that_was_cut_is_taken_up(tmp_path: Path, torn: bytes) -> None:
    """No finished line is computed again, also if the last record is torn."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = [f"line-{number}" for number in range(12)]
    source.write_text("\n".join(line(each) for each in ids))
    first, second = InMemoryClient(), InMemoryClient()
    assert run(first, source, target, stop_after=5) is None
    assert not target.exists()
    aside = tmp_path / "out.jsonl.partial"
    num_finished = len(aside.read_bytes().splitlines())
    assert 5 <= num_finished < 12
    with aside.open("ab") as file:
        file.write(torn)
    counts = run(second, source, target)
    assert counts == BatchCounts(num_lines=12, num_kept=num_finished)
    assert len(second.added) == 12 - num_finished
    whole = tmp_path / "whole.jsonl"
    run(InMemoryClient(), source, whole)

    def texts(path: Path) -> list[Any]:
        return [
            (each["custom_id"], each["response"]["body"]["choices"][0]["message"])
            for each in answers(path)
        ]

    assert texts(target) == texts(whole)
    assert [custom_id for custom_id, _ in texts(target)] == ids


def test_faults_of_the_server_are_asked_again(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("one"))
    key = hashlib.blake2b(line("one").encode(), digest_size=16).hexdigest()
    aside = tmp_path / "out.jsonl.partial"
    aside.write_text(f'{key} {{"response": {{"status_code": 500}}}}\n')
    counts = run(InMemoryClient(), source, target)
    assert counts == BatchCounts(num_lines=1)
    assert answers(target)[0]["response"]["status_code"] == 200


def test_files_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        run(InMemoryClient(), tmp_path / "absent", tmp_path / "out")
    (tmp_path / "in").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        run(InMemoryClient(), tmp_path / "in", tmp_path / "absent" / "out")


def test_no_line_is_shed(tmp_path: Path) -> None:
    """Fault: with many lines under way the server's bound on waiting tokens refused most."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": list(range(100, 300)), "max_tokens": 1, "seed": 1}
    source.write_text("\n".join(line(f"{i}", "/v1/completions", **body) for i in range(128)))
    counts = run(InMemoryClient(), source, target, max_together=128)
    assert counts == BatchCounts(num_lines=128)


@pytest.mark.parametrize("state", [EngineState.RESTARTING, EngineState.STALLED])
def test_a_restart_burns_no_line(tmp_path: Path, state: EngineState) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"{number}") for number in range(12)))

    async def restart(client: InMemoryClient) -> None:
        client.state = state
        await asyncio.sleep(0.5)
        assert not client.added
        client.state = EngineState.READY

    assert run(InMemoryClient(), source, target, faults=restart) == BatchCounts(num_lines=12)


class Refusing(InMemoryClient):
    """Takes no request at first, though it says that it is ready."""

    num_refused = 0

    async def add(self, request: EngineRequest) -> UpdateStream:
        if self.num_refused < 2:
            self.num_refused += 1
            raise EngineUnavailableError("the engine is restarting")
        return await super().add(request)


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/messages"])
def test_a_line_that_came_too_early_is_asked_again(tmp_path: Path, url: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("one", url, model=MODEL, messages=MESSAGES, max_tokens=3))
    client = Refusing()
    assert run(client, source, target) == BatchCounts(num_lines=1)
    assert client.num_refused == 2


def test_an_engine_that_ends_for_good_ends_the_run(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"{number}") for number in range(12)))
    client = InMemoryClient()
    client.state = EngineState.DEAD
    with pytest.raises(EngineError, match="The engine is dead"):
        run(client, source, target)
    assert not target.exists()


def test_a_line_that_the_server_fails_at_is_left_to_the_next_run(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = [f"line-{number}" for number in range(6)]
    source.write_text("\n".join(line(each) for each in ids))
    client = InMemoryClient()
    client.fail_after = 6
    first = run(client, source, target)
    assert first is not None and 0 < first.num_failed < 6
    statuses = [each["response"]["status_code"] for each in answers(target)]
    assert any(status >= 500 for status in statuses)
    second = InMemoryClient()
    assert run(second, source, target) == BatchCounts(6, num_kept=6 - first.num_failed)
    assert len(second.added) == first.num_failed
    assert [each["response"]["status_code"] for each in answers(target)] == [200] * 6
    assert not list(tmp_path.glob("*.partial*"))
