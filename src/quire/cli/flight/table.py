"""A dump of the flight recorder as text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from quire.telemetry.flight.dump import FlightDump
from quire.telemetry.flight.record import (
    EventKind,
    FlightRecord,
    FlightStep,
    read_record,
)

__all__ = ["lines_of"]

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
        yield "no engine core had begun"
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
