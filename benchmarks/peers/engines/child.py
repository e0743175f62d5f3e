"""An engine in a process of its own, so that it lives in its own environment and several are open
at once: `python -m benchmarks.peers.engines.child`, with the repository's root on PYTHONPATH.

One JSON line per request on stdin, one per answer on stdout; the process ends when stdin does.
The first request opens the engine, every later one runs requests of its kind. An answer to a run
also tells how long the process was idle before and how much processor time it took meanwhile,
since an engine whose threads spin would slow the one whose turn it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.engines.engine import Engine, EngineOptions, UnavailableError, run_requests


def main() -> None:
    requests, answers = take_pipes()
    line = requests.readline()
    if not line:
        return
    try:
        engine = open_asked(json.loads(line))
    except UnavailableError as reason:
        send(answers, {"unavailable": str(reason)})
        return
    send(answers, {"settings": engine.settings})
    idle = IdleClock()
    for line in requests:
        answer = {"idle": idle.reading(), "timeline": run_asked(engine, json.loads(line))}
        idle = IdleClock()
        send(answers, answer)
    engine.close()


def take_pipes() -> tuple[IO[str], IO[str]]:
    """Requests and answers. Whatever else reads or prints here, or in a process started here, gets
    nothing and the error output."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def send(answers: IO[str], answer: dict[str, Any]) -> None:
    print(json.dumps(answer, default=str), file=answers, flush=True)


def open_asked(request: dict[str, Any]) -> Engine:
    """Raises UnavailableError, also for a package that this interpreter lacks."""
    options = request["options"]
    for name in ("model", "work_dir"):
        options[name] = Path(options[name])
    try:
        return import_module(request["module"]).open_engine(EngineOptions(**options))
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{error.name} is not installed for {sys.executable}") from error


def run_asked(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    return asdict(run_requests(engine, request["prompts"], request["output_lengths"]))


class IdleClock:
    """Clock that starts when it is created."""

    def __init__(self) -> None:
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def reading(self) -> dict[str, float]:
        """Seconds, and processor seconds of all threads of this process."""
        return {
            "seconds": time.perf_counter() - self._started,
            "cpu_seconds": time.process_time() - self._cpu,
        }


if __name__ == "__main__":
    main()
