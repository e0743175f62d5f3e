"""`quire flight`: shows a dump of the flight recorder, or writes it as a timeline."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.base.telemetry.flight.dump import FlightDump, decode_dump
from quire.base.telemetry.flight.record import EventKind, FlightRecord, FlightStep, read_record
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "perfetto", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("dump", type=Path, help="file that a server or an engine wrote")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev instead"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="last steps and events to show of each core"
    )


def run(options: argparse.Namespace) -> int:
    """Print the dump, or write its timeline. ConfigError, and so status 2, for a file that is no
    whole dump."""
    if options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}. Give 1 or more.")
    try:
        dump = decode_dump(options.dump.read_bytes())
    except OSError as error:
        raise ConfigError(f"{options.dump} cannot be read ({error.strerror})") from error
    except ConfigError as error:
        raise ConfigError(f"{options.dump}: {error}") from error
    if options.perfetto is None:
        print("\n".join(lines_of(dump, options.steps)))
        return 0
    output = check_output("--perfetto", options.perfetto, [options.dump])
    output.write(json.dumps(perfetto(dump)))
    print(f"wrote {options.perfetto}: open it at https://ui.perfetto.dev")
    return 0


# --- as text ------------------------------------------------------------------------------------

_HEADS = (
    "step", "ago s", "rows", "decode", "prefill", "plan ms", "wait ms", "compute ms", "tokens",
    "running", "waiting", "free", "tickets", "why no more",
)  # fmt: skip


def lines_of(dump: FlightDump, most: int) -> Iterator[str]:
    """Yield the lines. most: number of the last steps and events to show of each core."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(dump.wall_ns / 1e9))
    yield f"{dump.reason}; {when} UTC, quire {dump.quire}"
    for ring in dump.rings:
        yield ""
        yield from _core_lines(read_record(ring), dump.mono_ns, most)
    if not dump.rings:
        yield "no engine core had started"
    for each in dump.stacks:
        yield f"\n== stacks of the {each.name} (process {each.pid})"
        yield each.text


def _core_lines(record: FlightRecord, now: int, most: int) -> Iterator[str]:
    yield f"== core {record.replica} (process {record.pid}), {record.num_steps} steps"
    step = f" {record.step}" if record.step else ""
    yield f"{record.doing.words}{step}, for {_seconds(now - record.since)} s"
    open_ids = _open_requests(record)
    if open_ids:
        yield f"open requests: {', '.join(open_ids.values())}"
    rows = [_HEADS, *(_row(each, now) for each in record.steps[-most:])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS) - 1)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()
    newest = record.steps[-1] if record.steps else None
    if newest is not None and not newest.has_result:
        named = (open_ids.get(each, str(each)) for each in newest.planned.first_handles)
        yield f"rows of step {newest.planned.number}: {', '.join(named)}"
    names = {event.handle: event.text for event in record.events if event.kind is EventKind.ADDED}
    for event in record.events[-most:]:
        who = names.get(event.handle, f"request {event.handle}")
        what = _PHRASES[event.kind].format(who=who, value=event.value, text=event.text)
        yield f"{_seconds(now - event.at)} s ago: {what}"
    for name, fact in record.facts.items():
        yield f"{name}: {fact}"


_PHRASES = {
    EventKind.ADDED: "{who} came with {value} prompt tokens",
    EventKind.BLOCKED: "{who} waits for {text} (ticket {value})",
    EventKind.UNBLOCKED: "{who} does not wait for ticket {value} any more",
    EventKind.ADMITTED: "{who} was admitted with {value} cached tokens",
    EventKind.PREEMPTED: "{who} was preempted: {value} tokens {text}",
    EventKind.ENDED: "{who} ended: {text}",
    EventKind.FAULT: "fault, at step {value}: {text}",
    EventKind.CONTROL: "operation {text}",
}


def _open_requests(record: FlightRecord) -> dict[int, str]:
    """Return the ids of requests that have begun within the ring and not ended, by handle."""
    found: dict[int, str] = {}
    for event in record.events:
        if event.kind is EventKind.ADDED:
            found[event.handle] = event.text
        elif event.kind is EventKind.ENDED:
            found.pop(event.handle, None)
    return found


def _row(step: FlightStep, now: int) -> tuple[str, ...]:
    planned, ended = step.planned, step.ended
    times = [_ms(ended.wait_us), _ms(ended.compute_us), str(ended.tokens)]
    return (
        str(planned.number),
        _seconds(now - planned.begin),
        str(planned.rows),
        str(planned.decode),
        str(planned.prefill),
        _ms(step.given.plan_us),
        *(times if step.has_result else ["-", "-", "-"]),
        str(planned.running),
        str(planned.waiting),
        str(planned.free),
        str(planned.tickets),
        planned.why,
    )


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3f}"


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.2f}"


# --- as a timeline ------------------------------------------------------------------------------

_Event = dict[str, Any]

PLAN, WAIT, COMPUTE, APPLY, NOW = range(1, 6)
_TRACKS = {PLAN: "plan", WAIT: "wait", COMPUTE: "compute", APPLY: "apply", NOW: "at the dump"}


def perfetto(dump: FlightDump) -> dict[str, Any]:
    """Return a timeline to write as JSON ("Trace Event Format", Google), which Perfetto and
    chrome://tracing open: the names of processes and tracks, and events by their times, in
    microseconds of the clock of the rings.

    Steps are slices on the tracks of their phases, requests are asynchronous slices, since they
    overlap, and blocks and rows are counters.
    """
    names: list[_Event] = []
    timed: list[_Event] = []
    for ring in dump.rings:
        record = read_record(ring)
        names += _names(record)
        timed += _of_core(record, dump.mono_ns)
    names += [
        _meta(each.pid, 0, "process_name", each.name)
        for each in dump.stacks
        if all(each.pid != event["pid"] for event in names)
    ]
    timed.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*names, *timed],
        "displayTimeUnit": "ms",
        "otherData": {
            "reason": dump.reason,
            "quire": dump.quire,
            "stacks": {f"{each.name} ({each.pid})": each.text for each in dump.stacks},
        },
    }


def _names(record: FlightRecord) -> list[_Event]:
    pid = record.pid
    tracks = [_meta(pid, tid, "thread_name", name) for tid, name in _TRACKS.items()]
    return [_meta(pid, 0, "process_name", f"core {record.replica}"), *tracks]


def _meta(pid: int, tid: int, name: str, value: str) -> _Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": value}}


def _of_core(record: FlightRecord, end_ns: int) -> list[_Event]:
    events: list[_Event] = []
    computed = 0.0  # end of the last slice of the track, on which slices follow one another
    for step in record.steps:
        for event in _of_step(step, computed, record.pid):
            events.append(event)
            if event["ph"] == "X" and event["tid"] == COMPUTE:
                computed = event["ts"] + event["dur"]
    events += _requests(record, end_ns)
    name = record.doing.words + (f" {record.step}" if record.step else "")
    since = min(record.since, end_ns)
    events.append(_slice(record.pid, NOW, name, since, (end_ns - since) // 1000, {}))
    return events


def _of_step(step: FlightStep, computed: float, pid: int) -> Iterator[_Event]:
    planned, given, ended = step.planned, step.given, step.ended
    name = f"step {planned.number}"
    facts = {
        "rows": planned.rows,
        "decode": planned.decode,
        "prefill": planned.prefill,
        "drafts": planned.drafts,
        "handles": list(planned.first_handles),
        "why no more": planned.why,
    }
    begin = given.plan_begin or planned.begin  # 0: the executor has not got it
    yield _slice(pid, PLAN, name, begin, given.plan_us + given.give_us, facts)
    for counter, values in (
        ("KV blocks", {"used": planned.used, "cached": planned.cached, "free": planned.free}),
        ("requests", {each: getattr(planned, each) for each in ("running", "waiting", "blocked")}),
        ("tokens", {"decode": planned.decode, "prefill": planned.prefill}),
    ):
        yield {
            "ph": "C", "pid": pid, "tid": 0, "name": counter, "ts": _us(begin),
            "args": values,
        }  # fmt: skip
    if not step.has_result:
        return
    done_ns = ended.wait_begin + ended.wait_us * 1000
    yield _slice(pid, WAIT, name, ended.wait_begin, ended.wait_us, {})
    if ended.compute_us:
        # The core learns how long a step computed, not when: it ended before the wait did.
        start = max(_us(done_ns) - ended.compute_us, computed, _us(begin))
        duration = max(_us(done_ns) - start, 0.0)
        result = {"tokens": ended.tokens, "accepted": ended.accepted, "us": ended.compute_us}
        yield _event("X", pid, COMPUTE, name, start, dur=duration, args=result)
        arrow = {"cat": "step", "id": planned.number}
        yield _event("s", pid, PLAN, name, _us(begin), **arrow)
        yield _event("f", pid, COMPUTE, name, start, bp="e", **arrow)
    yield _slice(pid, APPLY, name, done_ns, step.apply_us, {})


def _requests(record: FlightRecord, end_ns: int) -> Iterator[_Event]:
    """Yield what became of each request. One that began before the ring begins with it, and one
    that is open ends with the dump, so that each beginning has its end. What happens to samples
    behind the end of the first one, under whose handle it is noted, is a mark of the core."""
    pid = record.pid
    open_ids: dict[int, str] = {}
    ended: dict[int, str] = {}
    first_ns = _first_ns(record.events, record.steps, end_ns)

    def begun(handle: int, name: str, at: int) -> Iterator[_Event]:
        open_ids[handle] = name
        yield _of_request("b", pid, handle, name, at, {})

    for event in record.events:
        handle, kind = event.handle, event.kind
        if handle < 0:
            name = f"{kind.name.lower()}: {event.text}"
            yield _event("i", pid, NOW, name, _us(event.at), s="p", args={"step": event.value})
            continue
        if handle in ended:
            name = f"{kind.name.lower()}: {ended[handle]} {event.text}".rstrip()
            yield _event("i", pid, NOW, name, _us(event.at), s="p", args={"value": event.value})
            continue
        if kind is EventKind.ADDED:
            yield from begun(handle, event.text or str(handle), event.at)
        elif handle not in open_ids:
            yield from begun(handle, str(handle), first_ns)
        if kind is EventKind.ENDED:
            name = ended[handle] = open_ids.pop(handle)
            yield _of_request("e", pid, handle, name, event.at, {"reason": event.text})
            continue
        facts = {"what": kind.name.lower(), "value": event.value, "text": event.text}
        yield _of_request("n", pid, handle, open_ids[handle], event.at, facts)
    for handle, name in open_ids.items():
        yield _of_request("e", pid, handle, name, end_ns, {"reason": "open at the dump"})


def _first_ns(events: Sequence[Any], steps: Sequence[FlightStep], end_ns: int) -> int:
    times = [*(each.at for each in events[:1]), *(each.planned.begin for each in steps[:1])]
    return min([*times, end_ns])


def _of_request(
    phase: str, pid: int, handle: int, name: str, at: int, facts: dict[str, Any]
) -> _Event:
    return _event(phase, pid, 0, name, _us(at), cat="request", id=handle, args=facts)


def _slice(
    pid: int, tid: int, name: str, begin_ns: int, duration_us: int, facts: dict[str, Any]
) -> _Event:
    return _event("X", pid, tid, name, _us(begin_ns), dur=duration_us, args=facts)


def _event(phase: str, pid: int, tid: int, name: str, ts: float, **more: Any) -> _Event:
    return {"ph": phase, "pid": pid, "tid": tid, "name": name, "ts": ts, **more}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
