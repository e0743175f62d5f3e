"""Planted faults and stalls: each gives a dump that names what happened, in the core's process and
in those of others."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.base.telemetry.flight.dump import FlightDump, decode_dump
from quire.base.telemetry.flight.dump import collect as collect_dump
from quire.base.telemetry.flight.record import (
    Doing,
    EventKind,
    FlightRecord,
    FlightRecorder,
    read_record,
)
from quire.base.telemetry.flight.stacks import gather_stacks
from tests.engine.fake_core_process import HANGER, KILLER, FakeCoreOptions
from tests.engine.fake_engine import FakeEngine
from tests.engine.hanging_rank import CORE_COMMAND as HANGING_RANKS
from tests.engine.hanging_rank import HANG
from tests.engine.process_harness import ask, collect, hosted, run
from tests.engine.test_rank_faults import SETTINGS, children_of
from tests.waiting import WAIT_S, wait_for

FAULTY = FakeCoreOptions(step_s=0.002, fault_after=3)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of dumps of this user, also for processes that are started."""
    with tempfile.TemporaryDirectory(prefix="q") as directory:  # short enough for sockets
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        patient = partial(gather_stacks, patience_s=WAIT_S)  # a busy core may write late
        monkeypatch.setattr("quire.base.telemetry.flight.dump.gather_stacks", patient)
        yield Path(directory) / f"quire-flight-{os.getuid()}"


def dumps_in(folder: Path, word: str) -> list[FlightDump]:
    return [
        decode_dump(file.read_bytes()) for file in sorted(folder.glob(f"flight-*-{word}-*.bin"))
    ]


def dump_in(folder: Path, word: str) -> tuple[FlightDump, FlightRecord]:
    """Return the first dump with this word, and its ring."""
    dump = wait_for(lambda: dumps_in(folder, word), f"dump of a {word}")[0]
    (ring,) = dump.rings
    return dump, read_record(ring)


def text_of(dump: FlightDump, name: str) -> str:
    (text,) = [each.text for each in dump.stacks if each.name == name]
    return text


def test_a_core_that_is_killed_leaves_what_it_did(folder: Path) -> None:
    async def work() -> None:
        async with hosted(FAULTY, max_replays=0) as host:
            poison = await ask(host.client, [5, KILLER, 7], max_tokens=50)
            await collect(poison)
            await asyncio.to_thread(dump_in, folder, "fault")

    run(work())
    dump, record = dump_in(folder, "fault")
    assert "killed by SIGKILL" in dump.reason
    assert not record.steps[-1].has_result, "the step that killed it has no result"
    handle = next(event.handle for event in record.events if event.kind is EventKind.ADDED)
    assert record.steps[-1].planned.first_handles == (handle,)
    assert record.doing in (Doing.GIVING, Doing.AWAITING_RESULT)
    assert "Thread MainThread" in text_of(dump, "server")


def test_a_core_that_hangs_says_where(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with hosted(FAULTY, stall_s=2.0, max_replays=0) as host:
            await collect(await ask(host.client, [5, HANGER, 7], max_tokens=50))
            await asyncio.to_thread(dump_in, folder, "stall")

    run(work())
    dump, record = dump_in(folder, "stall")
    assert dump.reason.startswith("stall: "), "by its step, or by its silence on a busy machine"
    assert "in _fall" in text_of(dump, "core"), "the function that hangs"
    assert record.doing is Doing.GIVING
    assert dump.mono_ns - record.since > 1e9, "for so long"
    assert "in _fall" in caplog.text and "quire flight" in caplog.text
    assert not dumps_in(folder, "fault"), "its end is no other news"


def test_a_stop_writes_none(folder: Path) -> None:
    async def work() -> None:
        async with hosted(FAULTY) as host:
            await collect(await ask(host.client, [5, 6], max_tokens=5))

    run(work())
    assert not folder.exists()


def test_a_core_that_cannot_start_writes_none(folder: Path) -> None:
    async def work() -> None:
        options = FakeCoreOptions(start_error="config:no such model: name another one")
        async with hosted(options, wait=False) as host:
            with pytest.raises(Exception, match="no such model"):
                await host.supervision

    run(work())
    assert not folder.exists()


def test_a_step_that_is_lost_is_a_fault_of_the_engine() -> None:
    seen: list[tuple[str, FlightRecord]] = []

    def on_fault(reason: str) -> None:
        seen.append((reason, read_record(recorder.snapshot())))

    recorder = FlightRecorder(on_fault=on_fault)
    engine = FakeEngine(flight=recorder)
    engine.add(range(9), max_tokens=20)
    for _ in range(3):
        engine.step()
    execute: Callable[..., Any] = engine.core._executor.execute

    def failing(plan: Any) -> Any:
        execute(plan)
        lost = Future[Any]()
        lost.set_exception(RuntimeError("device lost"))
        return lost

    engine.core._executor.execute = failing  # type: ignore[method-assign]
    engine.run()
    ((reason, record),) = seen
    assert reason == "fault: a step was lost (RuntimeError: device lost)"
    assert record.events[-1].kind is EventKind.FAULT
    assert not record.steps[-1].has_result, "it is written while the step is in flight"
    after = read_record(recorder.snapshot())
    assert after.events[-1].kind is EventKind.ENDED and "lost the step" in after.events[-1].text


def test_an_llm_writes_a_dump_when_a_step_is_lost(folder: Path) -> None:
    with LLM(quiet=True, max_model_len=256, num_kv_blocks=64) as llm:
        client: Any = llm.engine.client
        worker = client._core._executor._worker
        worker.launch = lambda plan: (_ for _ in ()).throw(RuntimeError("planted"))
        with pytest.raises(RequestError, match="lost the step"):
            llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
    dump, record = dump_in(folder, "fault")
    assert "planted" in dump.reason
    assert record.facts["kernels"] and any(" (" in fact for fact in record.facts.values())
    assert "run_step" in text_of(dump, "engine"), "where the caller was"
    assert any(event.kind is EventKind.FAULT for event in record.events)


def test_stacks_of_the_ranks_are_in_a_dump(folder: Path) -> None:
    """A rank that hangs in its main thread is shown where it hangs, beside core and server."""

    async def work() -> None:
        async with hosted(settings=SETTINGS, command=HANGING_RANKS, stall_s=WAIT_S) as host:
            core = host.supervisor.pid
            assert core is not None
            (rank,) = children_of(core)

            def hangs() -> bool:
                os.kill(rank, HANG)
                seen = collect_dump("look", "test", [host.directory])
                is_idle = read_record(seen.rings[0]).doing is Doing.IDLE
                return is_idle and "in hang" in text_of(seen, "rank 1")

            await asyncio.to_thread(wait_for, hangs, "rank that hangs")
            await asyncio.to_thread(host.write_dump, "signal: test")
            os.kill(core, signal.SIGKILL)

    run(work())
    dump, record = dump_in(folder, "signal")
    assert {each.name for each in dump.stacks} == {"server", "core", "rank 1"}
    assert "in hang" in text_of(dump, "rank 1")
    assert "engine/core/loop.py" in text_of(dump, "core")
    assert record.doing is Doing.IDLE
