"""The flight recorder: a ring that wraps, dumps that are whole or refused, a folder that stays
small, and a timeline that viewers take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.telemetry.flight.dump import (
    DumpFolder,
    FaultDumps,
    FlightDump,
    collect,
    decode_dump,
    encode_dump,
)
from quire.base.telemetry.flight.record import (
    EVENT_BYTES,
    FACTS_BYTES,
    HEADER_BYTES,
    LOST,
    STEP_BYTES,
    Doing,
    EventKind,
    FlightRecorder,
    PlannedPart,
    read_record,
    ring_in,
)
from quire.base.telemetry.flight.stacks import (
    ProcessStacks,
    StackPlace,
    forget_stacks,
    gather_stacks,
)
from quire.entrypoints.cli.flight import perfetto
from quire.entrypoints.cli.main import main
from tests.engine.fake_engine import FakeEngine
from tests.waiting import WAIT_S, wait_for

STEP = PlannedPart(
    number=1, begin=5, rows=3, prompt_rows=1, decode=2, prefill=30, drafts=4, running=3, waiting=6,
    blocked=1, free=7, cached=8, used=9, evicted=10, tickets=1, in_flight=1, preempted=2,
    reason="zu wenige Blöcke sind frei".encode(), handles=bytes(8) + b"\x05" + bytes(55),
)  # fmt: skip


def ran(recorder: FlightRecorder, first: int, last: int) -> None:
    for number in range(first, last + 1):
        begin = recorder.enter(Doing.PLANNING)
        recorder.planned(STEP._replace(number=number, begin=begin))
        recorder.given(begin, recorder.enter(Doing.GIVING))
        recorder.waited(recorder.enter(Doing.AWAITING_RESULT))
        recorder.ended(0.002, 3, 2 * number)
        recorder.applied()


def dump_of(engine: FakeEngine, reason: str = "fault: planted") -> FlightDump:
    return collect(reason, "test", rings=[engine.core.flight.snapshot()])


def busy_engine() -> FakeEngine:
    """Return an engine with requests that ended, one that was preempted, and one that is open."""
    engine = FakeEngine(num_blocks=12, max_num_batched_tokens=16)
    engine.add(range(20), max_tokens=9)
    engine.add(range(50, 70), max_tokens=9, n=2)
    engine.run()
    engine.add(range(8), max_tokens=30)
    for _ in range(5):
        engine.step()
    return engine


def test_a_step_comes_back_as_it_was_noted() -> None:
    recorder = FlightRecorder(replica=3)
    recorder.note_facts({"threads": "2 (cores that this process may use)"})
    ran(recorder, 1, 1)
    record = read_record(recorder.snapshot())
    (step,) = record.steps
    assert step.planned._replace(begin=5, reason=b"", handles=b"") == STEP._replace(
        reason=b"", handles=b""
    )
    assert step.planned.why == "zu wenige Blöcke sind frei"
    assert step.planned.first_handles == (0, 5, 0)
    assert step.has_result and step.ended.tokens == 3 and step.ended.accepted == 2
    assert step.ended.compute_us == 2000 and step.given.plan_begin == step.planned.begin
    assert (record.replica, record.pid, record.num_steps) == (3, os.getpid(), 1)
    assert record.facts == {"threads": "2 (cores that this process may use)"}
    assert record.doing is Doing.BETWEEN_STEPS


def test_each_step_names_its_own_rows() -> None:
    """Fault: a step with as many rows as the last one gets the handles of that one. Here the second
    sample goes on while the last token of the first is in flight, so that no event is between."""
    engine = FakeEngine(max_num_batched_tokens=1)
    engine.add([1], max_tokens=5, n=2)
    engine.run()
    steps = read_record(engine.core.flight.snapshot()).steps
    assert [step.planned.first_handles for step in steps] == [(0,)] * 5 + [(1,)] * 4


def test_the_ring_wraps_and_keeps_the_last() -> None:
    recorder = FlightRecorder(num_steps=8, num_events=4)
    ran(recorder, 1, 21)
    for i in range(9):
        recorder.event(EventKind.ADDED, i, 10 * i, f"request {i}")
    record = read_record(recorder.snapshot())
    assert [step.planned.number for step in record.steps] == list(range(14, 22))
    assert [event.handle for event in record.events] == [5, 6, 7, 8]
    assert record.num_steps == 21
    numbers = [step.planned.number for step in recorder.recent(0, 3)]
    assert numbers == [19, 20, 21]
    begin = record.steps[-2].planned.begin
    assert [step.planned.number for step in recorder.recent(begin, 8)] == [20, 21]


def test_a_step_takes_at_most_512_bytes() -> None:
    """Steps and events of a busy engine together, not only the slot of one."""
    engine = FakeEngine(num_blocks=64, max_num_seqs=8)
    for i in range(24):
        engine.add([i, *range(12)], max_tokens=16)
    engine.run()
    record = read_record(engine.core.flight.snapshot())
    assert record.num_steps > 40 and len(record.events) >= 3 * 24
    written = record.num_steps * STEP_BYTES + len(record.events) * EVENT_BYTES
    assert written <= 512 * record.num_steps
    assert STEP_BYTES <= 512


def test_a_slot_that_is_being_written_is_left_out() -> None:
    recorder = FlightRecorder(num_steps=4)
    ran(recorder, 1, 4)
    data = bytearray(recorder.snapshot())
    second = data.index((2).to_bytes(8, "little"), HEADER_BYTES + FACTS_BYTES + STEP_BYTES)
    data[second] = 6  # its number has been replaced, and the one at its end has not
    steps = read_record(bytes(data)).steps
    assert [step.planned.number for step in steps] == [1, 3, 4]


def test_steps_in_flight_are_named_and_lost_ones_marked() -> None:
    recorder = FlightRecorder()
    recorder.planned(STEP)
    recorder.planned(STEP._replace(number=2))
    recorder.enter(Doing.AWAITING_RESULT)
    record = read_record(recorder.snapshot())
    assert (record.doing, record.step) == (Doing.AWAITING_RESULT, 1)
    assert [step.has_result for step in record.steps] == [False, False]
    recorder.lost()
    assert [step.ended.status for step in read_record(recorder.snapshot()).steps] == [LOST, LOST]
    recorder.ended(0.1, 1, 0)  # late news of a lost step change nothing
    assert read_record(recorder.snapshot()).steps[1].ended.status == LOST


def test_facts_that_have_no_room_are_left_out() -> None:
    recorder = FlightRecorder()
    recorder.note_facts({"short": "yes", "long": "x" * 20_000, "wide": "ü" * 100})
    assert read_record(recorder.snapshot()).facts == {"short": "yes", "wide": "ü" * 100}


def test_long_and_odd_texts_are_cut() -> None:
    recorder = FlightRecorder()
    recorder.event(EventKind.ADDED, 1, 2, "ü" * 300)
    recorder.planned(STEP._replace(reason=b"r" * 300))
    recorder.enter(Doing.GIVING)
    record = read_record(recorder.snapshot())
    assert record.events[0].text == "ü" * 34
    assert record.steps[0].planned.why == "r" * 96


def test_an_error_that_is_no_utf8_is_noted() -> None:
    """An error may name a file in bytes that are no text."""
    reasons: list[str] = []
    recorder = FlightRecorder(on_fault=reasons.append)
    recorder.planned(STEP._replace(reason=recorder.reason_of("no \udc80")))
    recorder.enter(Doing.GIVING)
    recorder.fault("cannot read a\udcff")
    record = read_record(recorder.snapshot())
    assert record.steps[0].planned.why == "no ?"
    assert (record.events[0].text, record.events[0].value) == ("cannot read a?", STEP.number)
    dump = decode_dump(encode_dump(collect(reasons[0], "test")))
    assert dump.reason == "fault: cannot read a?"


def test_the_file_of_a_ring_is_read_by_others(tmp_path: Path) -> None:
    recorder = FlightRecorder(ring_in(tmp_path, 4))
    ran(recorder, 1, 2)
    ring_in(tmp_path, 3)  # of a core before it
    dump = collect("signal: test", "test", [tmp_path])
    assert [read_record(ring).num_steps for ring in dump.rings] == [2]
    assert stat.S_IMODE((tmp_path / "flight-4").stat().st_mode) == 0o600


@pytest.mark.parametrize("place", ["magic", "version", "size"])
def test_a_ring_of_something_else_is_refused(place: str) -> None:
    data = bytearray(FlightRecorder(num_steps=2, num_events=2).snapshot())
    if place == "magic":
        data[0] ^= 1
    elif place == "version":
        data[8] = 99
    else:
        del data[-1]
    with pytest.raises(ConfigError, match=r"no ring|version 99|cut off"):
        read_record(bytes(data))


def test_a_torn_dump_is_refused_at_every_length() -> None:
    data = encode_dump(dump_of(busy_engine()))
    assert decode_dump(data).reason == "fault: planted"
    for length in [*range(64), len(data) // 2, len(data) - 1]:
        with pytest.raises(ConfigError, match=r"torn|no dump"):
            decode_dump(data[:length])
    damaged = bytearray(data)
    damaged[-10] ^= 1
    with pytest.raises(ConfigError, match="damaged"):
        decode_dump(bytes(damaged))
    with pytest.raises(ConfigError, match="damaged"):
        decode_dump(data + b"x")
    with pytest.raises(ConfigError, match="no dump"):
        decode_dump(b"PK\x03\x04 something else that is longer than a head")


def test_the_folder_keeps_the_last_dumps_for_this_user_alone(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path / "new" / "flight", num_kept=3)
    dump = dump_of(FakeEngine())
    files = [folder.write(dump) for _ in range(6)]
    assert sorted(folder.path.iterdir()) == files[3:]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert all(file and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files[3:])
    assert files[-1] is not None and "-fault-" in files[-1].name
    assert decode_dump(files[-1].read_bytes()) == dump


def test_a_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "private")
    (tmp_path / "private").mkdir(mode=0o700)
    for path in (shared, link):
        assert DumpFolder(path).write(dump_of(FakeEngine())) is None
        assert not list(path.iterdir())
    assert "mode 0700" in caplog.text


def test_faults_in_a_row_write_one_dump(tmp_path: Path) -> None:
    now = [0.0]
    taken: list[str] = []

    def take(reason: str) -> FlightDump:
        taken.append(reason)
        return dump_of(FakeEngine(), reason)

    dumps = FaultDumps(DumpFolder(tmp_path / "flight"), take, lambda: now[0])
    for at in (0.0, 1.0, 9.9, 10.1):
        now[0] = at
        dumps.fault(f"fault: at {at}")
    assert taken == ["fault: at 0.0", "fault: at 10.1"]
    assert len(list((tmp_path / "flight").iterdir())) == 2


def test_a_dump_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine has a fault to mend then."""

    def take(reason: str) -> FlightDump:
        raise RuntimeError("can't start new thread")

    dumps = FaultDumps(DumpFolder(tmp_path / "flight"), take)
    assert dumps.fault("fault: a step was lost") is None
    assert "can't start new thread" in caplog.text


# --- stacks ---------------------------------------------------------------------------------------

CHILD = """
import ctypes, os, sys, threading
from quire.base.telemetry.flight.stacks import StackFile, StackPlace
begun = threading.Event()
def waits_in_a_thread():
    begun.set()
    threading.Event().wait()
def holds_the_interpreter():
    os.write(1, b"!")
    while True: ctypes.PyDLL(None).sleep(600)  # a signal ends one sleep
def crashes():
    os.write(1, b"!")
    ctypes.string_at(0)
def waits():
    os.write(1, b"!")
    threading.Event().wait()
threading.Thread(target=waits_in_a_thread, daemon=True).start()
begun.wait()
StackFile(StackPlace(sys.argv[1], "core7"), sys.argv[2])
globals()[sys.argv[3]]()
"""


@contextlib.contextmanager
def child(directory: Path, name: str, function: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a file of stacks that has begun a function."""
    command = [sys.executable, "-c", CHILD, str(directory), name, function]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.read(1) == b"!"
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and wait, since one that still runs takes a later signal first."""

    def is_stopped() -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    process.send_signal(signal.SIGSTOP)
    wait_for(is_stopped, "stop")


def test_stacks_of_a_process_that_holds_its_interpreter(tmp_path: Path) -> None:
    with child(tmp_path, "rank 1", "holds_the_interpreter") as process:
        for _ in range(2):  # asked again, it gives those of the second time alone
            (found,) = gather_stacks([tmp_path], patience_s=WAIT_S)
            assert (found.name, found.pid) == ("rank 1", process.pid)
            assert found.text.count("holds_the_interpreter") == 1
            assert found.text.count("waits_in_a_thread") == 1
    assert gather_stacks([tmp_path]) == [], "it has ended, and nobody else gets its signal"
    forget_stacks(StackPlace(str(tmp_path), "core7"))
    assert not list(tmp_path.iterdir())


def test_a_crash_leaves_its_stacks(tmp_path: Path) -> None:
    with child(tmp_path, "core", "crashes") as process:
        assert process.wait() == -11
    (found,) = gather_stacks([tmp_path])
    assert found.text.startswith("Fatal Python error: Segmentation fault")
    assert "in crashes" in found.text


def test_a_stopped_process_is_named_without_stacks(tmp_path: Path) -> None:
    with child(tmp_path, "core", "waits") as process:
        stop(process)
        (found,) = gather_stacks([tmp_path], patience_s=0.1)
        assert found == ProcessStacks("core", process.pid, "it wrote none within 0.1 s")


def test_a_process_that_ends_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    """Fault: a dump waited for the stacks of a rank that had ended with its core."""

    def is_asked() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (pending,) = re.findall(r"ShdPnd:\s+(\w+)", status)
        return bool(int(pending, 16) >> (signal.SIGUSR1 - 1) & 1)

    with ThreadPoolExecutor(1) as pool, child(tmp_path, "core", "waits") as process:
        stop(process)
        gathered = pool.submit(gather_stacks, [tmp_path], 10 * WAIT_S)
        wait_for(is_asked, "signal")
        process.kill()
        assert gathered.result() == [ProcessStacks("core", process.pid, "it has ended")]


# --- what people see ------------------------------------------------------------------------------


def check_trace(trace: dict[str, Any]) -> None:
    """Hold a timeline against the format: keys of each phase, ordered times, slices of a track that
    do not cross, and an end for each beginning."""
    last = defaultdict[tuple[int, int], float](float)
    timed = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    begun: dict[Any, int] = defaultdict(int)
    arrows: set[Any] = set()
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        key = event.get("cat"), event["pid"], event.get("id")
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case "X":
                track = event["pid"], event["tid"]
                assert event["dur"] >= 0 and event["ts"] >= last[track] - 1.001, event
                last[track] = event["ts"] + event["dur"]
            case "C":
                assert all(isinstance(value, int) for value in event["args"].values())
            case "b":
                begun[key] += 1
            case "n":
                assert begun[key] == 1, event
            case "e":
                begun[key] -= 1
                assert begun[key] == 0, event
            case "s":
                arrows.add(key)
            case "f":
                arrows.remove(key)
            case "i":
                assert event["s"] == "p"
            case other:
                raise AssertionError(f"phase {other}")
    assert not any(begun.values()) and not arrows
    names = {event["pid"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {event["pid"] for event in timed} <= names


def timeline_of(recorder: FlightRecorder) -> dict[str, Any]:
    """Return a timeline, which is valid."""
    trace = perfetto(collect("test", "test", rings=[recorder.snapshot()]))
    check_trace(trace)
    return trace


def test_a_timeline_is_valid() -> None:
    engine = busy_engine()
    engine.core.flight.fault("planted")
    trace = perfetto(dump_of(engine))
    check_trace(trace)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"KV blocks", "requests", "tokens", "step 1", "fault: planted"} <= names
    marks = {event["args"]["what"] for event in trace["traceEvents"] if event["ph"] == "n"}
    assert {"added", "admitted", "preempted"} <= marks
    assert trace["otherData"]["reason"] == "fault: planted"
    json.dumps(trace)


def test_a_timeline_of_a_ring_that_wrapped_is_valid() -> None:
    """Requests end whose beginning has been overwritten."""
    recorder = FlightRecorder(num_steps=4, num_events=3)
    ran(recorder, 1, 9)
    for handle in range(3):
        recorder.event(EventKind.ADDED, handle, 4, f"request {handle}")
    recorder.event(EventKind.ENDED, 0, text="stop")
    recorder.event(EventKind.ENDED, 1, text="stop")
    timeline_of(recorder)


def test_a_first_sample_that_has_ended_does_not_begin_again() -> None:
    """Its handle stands for the request, whose other samples are preempted later."""
    recorder = FlightRecorder()
    recorder.event(EventKind.ADDED, 4, 7, "mine")
    recorder.event(EventKind.ADDED, 5, 7, "mine[1]")
    recorder.event(EventKind.ENDED, 4, text="stop")
    recorder.event(EventKind.PREEMPTED, 4, 9, "to be computed again")
    trace = timeline_of(recorder)
    of_first = [each["ph"] for each in trace["traceEvents"] if each.get("id") == 4]
    assert of_first == ["b", "n", "e"]
    marks = [each["name"] for each in trace["traceEvents"] if each["ph"] == "i"]
    assert marks == ["preempted: mine to be computed again"]


def test_the_command_shows_and_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = busy_engine()
    engine.core.flight.note_facts({"threads": "2 (asked for)"})
    file = tmp_path / "dump.bin"
    file.write_bytes(encode_dump(dump_of(engine)))
    assert main(["flight", str(file), "--steps", "400"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "fault: planted", "compute ms", "open requests: 3", "was preempted", "rows of step",
        "threads: 2 (asked for)", "stacks of the test", "test_the_command_shows_and_converts",
    ):  # fmt: skip
        assert part in shown, part
    out = tmp_path / "out.json"
    assert main(["flight", str(file), "--perfetto", str(out)]) == 0
    check_trace(json.loads(out.read_text()))


def test_the_command_refuses_what_is_no_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump.bin"
    assert main(["flight", str(file)]) == 2
    file.write_bytes(encode_dump(dump_of(FakeEngine()))[:-5])
    assert main(["flight", str(file)]) == 2
    assert main(["flight", str(file), "--steps", "0"]) == 2
    err = capsys.readouterr().err
    assert "No such file" in err and "the dump is torn" in err and "--steps is 0" in err
    file.write_bytes(encode_dump(dump_of(FakeEngine())))
    assert main(["flight", str(file), "--perfetto", str(file)]) == 2
    assert "is read, too" in capsys.readouterr().err
