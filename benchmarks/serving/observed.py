"""Cost of everything that says what a server did: 64 streams with all of it, and without, by turns.

    python -m benchmarks.serving.observed [--model FOLDER] [--no-receipts] [--output FILE]

Two servers of one model run side by side, and one of them has work at a time. The first has
receipts of all requests, traces to a collector that is not there, the flight recorder, and notes
for `quire explain`. With --no-receipts, its requests ask for no receipt. The second exports
nothing; its recorder and its notes are patched away, since they have no switch. Each turn has a
part on each server, in changing order, and gives processor seconds of its processes for each token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from benchmarks.arguments import command_line, positive_number
from benchmarks.serving.streamed_load import SERVE, Part, measure, served

from quire.entrypoints.bench.machine import current_commit, describe_machine

BARE_SERVER, BARE_CORE = "bare-server", "bare-core"
"""Arguments that make this script the second server, and its core."""
WARM_S = 5.0
NAMES = {True: "on", False: "off"}


def bare_core() -> int:
    """Run an engine core that notes nothing."""
    from quire.base.telemetry.flight.record import FlightRecorder
    from quire.engine.supervision import core_process
    from quire.plan.scheduler.readings.records import Records
    from quire.plan.scheduler.readings.step_log import StepLog

    for owner, names in (
        (FlightRecorder, ("enter", "event", "given", "waited", "ended", "applied")),
        (StepLog, ("added", "note")),
        (Records, ("begin", "count", "end_plan")),
    ):
        for name in names:
            setattr(owner, name, lambda *_, **_named: 0)
    return core_process.run_core_process(core_process._build)  # noqa: SLF001


def bare_server(port: int, settings: Sequence[str]) -> int:
    """Run a server that notes nothing, otherwise `quire serve`. settings: see `settings_of`."""
    import numpy as np

    from quire.config.settings import EngineSettings
    from quire.engine.supervision.supervisor import EngineSupervisor
    from quire.server import ServerSettings, run_server
    from quire.server.readings import prompt_memory

    nothing = np.zeros(0, np.uint32)
    prompt_memory._hashes = lambda _: nothing  # noqa: SLF001
    command = (sys.executable, "-m", __spec__.name, BARE_CORE)
    return run_server(
        EngineSettings.from_options(dict(each.split("=", 1) for each in settings)),
        ServerSettings(port=port, disable_access_log=True, disable_log_stats=True),
        make_supervisor=partial(EngineSupervisor, command=command),
    )


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """Give the URL of a collector that takes no connection."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def settings_of(url: str, model: str | None) -> list[str]:
    """Return the model of a server, and the kernels that it chose by measurement, as name=value,
    for another one."""
    program = httpx.get(f"{url}/admin/status").json()["capacity"]["facts"]["program"]
    chosen = {name: program[name] for name in ("linear_isa", "attention_isa")}
    return [f"{name}={value}" for name, value in {"model": model, **chosen}.items() if value]


def run(options: argparse.Namespace) -> dict[str, Any]:
    part_s = options.seconds / options.turns / 2
    turns: list[dict[bool, Part]] = []
    named = [options.model] if options.model else []
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(nobody())
        on = stack.enter_context(served((*SERVE, *named, "--otlp-traces-endpoint", collector)))
        alike = settings_of(on[0], options.model)
        bare = ("-m", __spec__.name, BARE_SERVER, "--settings", *alike)
        off = stack.enter_context(served(bare))
        servers = {True: (on, {"deterministic": options.receipts}), False: (off, {})}
        for (url, pid), body in servers.values():
            measure(url, pid, options.streams, min(WARM_S, part_s), body)
        for number in range(options.turns):
            parts: dict[bool, Part] = {}
            for is_on in (number % 2 == 0, number % 2 == 1):
                (url, pid), body = servers[is_on]
                parts[is_on] = measure(url, pid, options.streams, part_s, body)
            turns.append(parts)
            sys.stderr.write(f"turn {number + 1}: {ratio_of(parts):.3f}\n")
    return result_of(turns, options)


def ratio_of(turn: dict[bool, Part]) -> float:
    """Return processor time per token with everything, beside that without."""
    return round(turn[True].cpu_us_per_token / turn[False].cpu_us_per_token, 4)


def result_of(turns: list[dict[bool, Part]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": command_line(),
        "commit": current_commit(),
        "machine": asdict(describe_machine()),
        "model": options.model or "bundled",
        "receipts": options.receipts,
        "streams": options.streams,
        "seconds": options.seconds,
        "cpu_ratio_median": statistics.median(map(ratio_of, turns)),
        "cpu_us_per_token": {
            name: round(statistics.median(turn[is_on].cpu_us_per_token for turn in turns), 1)
            for is_on, name in NAMES.items()
        },
        "load_average": os.getloadavg(),
        "turns": [
            {
                **{NAMES[is_on]: asdict(part) for is_on, part in turn.items()},
                "ratio": ratio_of(turn),
            }
            for turn in turns
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder or file; the bundled model unless given")
    parser.add_argument("--receipts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=positive_number, default=540, help="of all turns")
    parser.add_argument("--turns", type=positive_number, default=9)
    parser.add_argument("--streams", type=positive_number, default=64)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("role", nargs="?", choices=(BARE_SERVER, BARE_CORE), help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=positive_number, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == BARE_CORE:
        return bare_core()
    if options.role == BARE_SERVER:
        return bare_server(options.port, options.settings)
    text = json.dumps(run(options), indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
