"""Hostile grammars beside plain streams, and the delays that the streams notice, over real HTTP.

    python -m benchmarks.decoding.hostile_schemas [--model FOLDER] [--seconds 300] [--turns 3]
        [--output benchmarks/results/hostile_schemas.json]

A turn is so many seconds of four plain streams alone, then as many beside a client that sends one
hostile grammar after the other (tests/grammar/hostile.py, in a seeded order, and a body that is no
UTF-8), each made new by a number so that no cache answers. That client is a process of its own,
with bodies made before, so that it does not slow those that measure. A *gap* is the time between
two chunks of a stream. Exit status 1 if the 99th percentile of the gaps is more than twice that
without the grammars in any turn, if a gap is longer than 500 ms, or if a grammar gets anything but
200 or 4xx.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line, positive_number
from tests.grammar.hostile import HOSTILE

from quire.entrypoints.bench.machine import current_commit, describe_machine
from quire.entrypoints.bench.record import percentile

STREAMS, TOKENS = 4, 400
MOST_TIMES, LONGEST_S = 2.0, 0.5
"""Times the p99 of a run without hostile grammars; any gap."""

NUMBER = b"_NUMBER_"

Attack = tuple[Counter[str], list[float]]
"""Number of answers by status; seconds of each answer."""

LIMIT_S = 150.0
"""Seconds that a client waits for an answer: a trial may take 30, and start a child before."""


def main() -> int:
    options = parse_arguments()
    load_before = os.getloadavg()
    turns: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with (
        served(options.model, options.threads) as port,
        ProcessPoolExecutor(1, mp_context=context) as attackers,
    ):
        attackers.submit(hostile_bodies).result()
        run(port, min(options.seconds, 5.0))  # kernels and graphs are settled
        for turn in range(options.turns):
            plain = run(port, options.seconds)
            arguments = (port, options.seed + turn, time.monotonic() + options.seconds)
            hostile = run(port, options.seconds, attackers.submit(attack, *arguments))
            turns.append({"plain": plain, "hostile": hostile})
            print(json.dumps(turns[-1], indent=1), flush=True)
    faults = [fault for turn in turns for fault in faults_of(**turn)]
    report = {
        "benchmark": "hostile_schemas",
        "commit": current_commit(),
        "command": " ".join(command_line()),
        "seed": options.seed,
        "machine": dataclasses.asdict(describe_machine()),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "streams": STREAMS,
        "turns": turns,
        "faults": faults,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the bundled one if left out")
    parser.add_argument("--threads", type=positive_number, default=2)
    parser.add_argument("--seconds", type=positive_number, default=300, help="of each run (300)")
    parser.add_argument("--turns", type=positive_number, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


@contextmanager
def served(model: str | None, threads: int) -> Iterator[int]:
    """The port of a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "quire", "serve", *([] if model is None else [model])]
    flags = ["--port", str(port), "--num-threads", str(threads), "--disable-access-log"]
    process = subprocess.Popen([*command, *flags])
    try:
        until = time.monotonic() + LIMIT_S
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"there is no server (status {process.returncode})")
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def run(port: int, seconds: float, attacked: Future[Attack] | None = None) -> dict[str, Any]:
    """Streams for so long, beside hostile grammars if an attack goes on."""
    until = time.monotonic() + seconds
    gaps: list[float] = []
    works = [
        threading.Thread(target=stream, args=(port, seed, until, gaps)) for seed in range(STREAMS)
    ]
    for work in works:
        work.start()
    for work in works:
        work.join()
    found: dict[str, Any] = {
        "tokens": len(gaps),
        "gap_ms": {
            "median": 1000 * percentile(gaps, 50),
            "p99": 1000 * percentile(gaps, 99),
            "longest": 1000 * max(gaps),
        },
    }
    if attacked is not None:
        outcomes, answers = attacked.result()
        found["grammars"] = len(answers)
        found["outcomes"] = dict(sorted(outcomes.items()))
        found["slowest_answer_s"] = max(answers)
    return found


def stream(port: int, seed: int, until: float, gaps: list[float]) -> None:
    """One stream after the other; adds the seconds between their chunks."""
    body = {
        "prompt": "A quire is", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "temperature": 1.0, "seed": seed,
    }  # fmt: skip
    while time.monotonic() < until:
        with asked(port, json.dumps(body).encode()) as answer:
            last = None
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > until:
                    return


def attack(port: int, seed: int, until: float) -> Attack:
    """Send one hostile grammar after the other, each with a number of its own."""
    bodies, order = hostile_bodies(), random.Random(seed)
    outcomes: Counter[str] = Counter()
    answers: list[float] = []
    while time.monotonic() < until:
        for body in order.sample(bodies, len(bodies)):
            started = time.monotonic()
            fresh = b"%s-%d" % (bytes(str(seed), "ascii"), len(answers))
            try:
                with asked(port, body.replace(NUMBER, fresh)) as answer:
                    answer.read()
                    outcomes[str(answer.status)] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
            answers.append(time.monotonic() - started)
            if time.monotonic() > until:
                break
    return outcomes, answers


@cache
def hostile_bodies() -> list[bytes]:
    """A body for each hostile grammar, in which NUMBER is to be replaced."""
    found = [b'{"prompt": "a", "guided_regex": "\xff\xfe%s"}' % NUMBER]
    for given in HOSTILE:
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": numbered(given)}
        found.append(json.dumps(body).encode())
    return found


def numbered(given: dict[str, Any]) -> dict[str, Any]:
    """The same grammar with a number, so that it is not known yet."""
    ((kind, value),) = given.items()
    number = NUMBER.decode()
    match kind, value:
        case "json", dict():
            return {kind: {**value, "title": number}}
        case "json", _:
            return {kind: f'{value[:1]}"title": "{number}", {value[1:]}'}
        case "regex", _:
            return {kind: f"{value}|{number}"}
        case "choice", _:
            return {kind: [*value, number]}
        case _:
            return {kind: f"{value}\n// {number}"}


@contextmanager
def asked(port: int, body: bytes) -> Iterator[HTTPResponse]:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, head)
        yield connection.getresponse()
    finally:
        connection.close()


def faults_of(plain: dict[str, Any], hostile: dict[str, Any]) -> list[str]:
    """Say what is not as it must be."""
    before, after = plain["gap_ms"]["p99"], hostile["gap_ms"]
    faults: list[str] = []
    if after["p99"] > MOST_TIMES * before:
        faults.append(f"the p99 of the gaps rose from {before:.1f} to {after['p99']:.1f} ms")
    if after["longest"] > 1000 * LONGEST_S:
        faults.append(f"a gap of {after['longest']:.0f} ms")
    wrong = {name: n for name, n in hostile["outcomes"].items() if name[0] not in "24"}
    return [*faults, f"outcomes {wrong}"] if wrong else faults


if __name__ == "__main__":
    sys.exit(main())
