"""`quire flight`: shows a dump of the flight recorder, or writes it as a timeline."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from quire.cli.parser import CommandParser
from quire.errors import ConfigError
from quire.platform.outputs import check_output
from quire.telemetry.flight.dump import FlightDump, decode_dump
from quire.telemetry.flight.perfetto import perfetto
from quire.telemetry.flight.record import (
    EventKind,
    FlightRecord,
    FlightStep,
    read_record,
)

__all__ = ["add_arguments", "run"]

_HEADS = (
    "step", "ago s", "rows", "decode", "prefill", "plan ms", "wait ms", "compute ms", "tokens",
    "running", "waiting", "free", "tickets", "why no more",
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("dump", type=Path, help="file that a server or an engine wrote")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev instead"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="last steps and events to show of each core"
    )


def run(options: argparse.Namespace) -> int:
    """Do as asked. ConfigError, and so status 2, for a file that is no whole dump."""
    if options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}. Give 1 or more.")
    try:
        dump = decode_dump(options.dump.read_bytes())
    except OSError as error:
        raise ConfigError(f"{options.dump} cannot be read ({error.strerror})") from error
    except ConfigError as error:
        raise ConfigError(f"{options.dump}: {error}") from error
    if options.perfetto is None:
        print("\n".join(_lines(dump, options.steps)))
        return 0
    output = check_output("--perfetto", options.perfetto, [options.dump])
    output.write(json.dumps(perfetto(dump)))
    print(f"wrote {options.perfetto}: open it at https://ui.perfetto.dev")
    return 0


def _lines(dump: FlightDump, most: int) -> Iterator[str]:
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
