"""A dump as a timeline in Chrome's trace format, which Perfetto and chrome://tracing open.

Steps are slices on the tracks of their phases, requests are asynchronous slices, since they
overlap, and blocks and rows are counters ("Trace Event Format", Google).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.telemetry.flight.dump import FlightDump
from quire.telemetry.flight.record import EventKind, FlightRecord, FlightStep, read_record

__all__ = ["perfetto"]

_Event = dict[str, Any]

PLAN, WAIT, COMPUTE, APPLY, NOW = range(1, 6)
_TRACKS = {PLAN: "plan", WAIT: "wait", COMPUTE: "compute", APPLY: "apply", NOW: "at the dump"}


def perfetto(dump: FlightDump) -> dict[str, Any]:
    """Return the object to write as JSON: events in the order of their times, behind the names of
    processes and tracks. Times are microseconds of the clock of the rings."""
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
