"""The HTTP front alone, its engine faked, beside a plain FastAPI echo of the same shape.

    python -m benchmarks.serving.front [--repeats 5] [--output FILE]

Each server has a process of its own; streamed requests come from this one, over loopback, to each
by turns. Rates are also given per second of processor time that the server took ("per core"), which
depends less on how busy the machine and the load generator are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arguments import command_line

from quire.base.errors import EngineError
from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.serving_load import Load, run_load
from quire.entrypoints.client import ServerAddress

SERVERS = ("quire", "fastapi")
VOCAB_SIZE, PROMPT_LENGTH, SEED = 2048, 32, 0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, each with PROMPT_LENGTH tokens in and `output_length` out, a chunk per token."""

    name: str
    num_requests: int
    output_length: int
    concurrency: int


CASES = (
    Case("one token", 1500, 1, 32),
    Case("512 tokens", 96, 512, 32),
    Case("512 tokens, 128 streams", 128, 512, 128),
)


@dataclass(frozen=True, slots=True)
class Server:
    process_id: int
    address: ServerAddress

    def cpu_s(self) -> float:
        """Processor time that its process has taken so far, all threads."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def started(name: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.serving.front_servers", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Server(process.pid, ServerAddress("http", "127.0.0.1", port, ""))
    finally:
        process.terminate()
        process.wait(20)


def measure(server: Server, case: Case, seed: int) -> dict[str, float]:
    """Rates of one load, by the wall clock and by the server's processor time."""
    lengths = [PROMPT_LENGTH] * case.num_requests
    load = Load(
        address=server.address,
        headers={"Content-Type": "application/json"},
        path="/v1/completions",
        bodies=[_body(prompt, case) for prompt in random_prompts(lengths, VOCAB_SIZE, seed)],
        arrivals=[0.0] * case.num_requests,
        max_concurrency=case.concurrency,
        timeout_s=60.0,
    )
    before = server.cpu_s()
    result = run_load(load)
    cpu_s = server.cpu_s() - before
    for answer in result.answers:
        if answer.error is not None or answer.num_output_tokens != case.output_length:
            raise EngineError(f"a request of {case.name!r} failed: {answer}")
    num_tokens = case.num_requests * case.output_length
    num_chunks = sum(len(answer.chunks) for answer in result.answers)
    return {
        "requests_per_s": case.num_requests / result.duration_s,
        "tokens_per_s": num_tokens / result.duration_s,
        "requests_per_core_s": case.num_requests / cpu_s,
        "tokens_per_core_s": num_tokens / cpu_s,
        "chunks_per_token": num_chunks / num_tokens,
        "generator_cpu_share": result.cpu_share,
    }


def _body(prompt: list[int], case: Case) -> bytes:
    asked = {"model": "bundled", "prompt": prompt, "max_tokens": case.output_length}
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return json.dumps({**asked, **options, "temperature": 0.0}).encode()


def by_turns(repeats: int) -> dict[str, list[float]]:
    """Values by "case, server, rate". Every server takes its turn in every repeat; one untimed
    round before."""
    values: dict[str, list[float]] = {}
    with started("quire") as ours, started("fastapi") as plain:
        servers = dict(zip(SERVERS, (ours, plain), strict=True))
        for repeat in range(repeats + 1):
            for case in CASES:
                for name, server in servers.items():
                    found = measure(server, case, SEED + repeat)
                    for rate, value in found.items() if repeat else ():
                        values.setdefault(f"{case.name}, {name}, {rate}", []).append(value)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    load_before = os.getloadavg()
    values = by_turns(options.repeats)
    # Loads torch for the machine's facts, which must not happen while servers are measured.
    from quire.entrypoints.bench.machine import measure_limits
    from quire.entrypoints.bench.record import new_record, spread_of

    figures = {name: spread_of(found) for name, found in values.items()}
    for name, found in figures.items():
        print(f"{name:55s} {found.median:10.2f}  ({found.low:.2f} to {found.high:.2f})")
    if options.output is None:
        return
    record = new_record(
        "front",
        command_line(),
        None,
        measure_limits(os.cpu_count() or 1),
        seed=SEED,
        workload={
            "prompt_length": PROMPT_LENGTH,
            "cases": {case.name: [case.num_requests, case.output_length] for case in CASES},
            "concurrency": {case.name: case.concurrency for case in CASES},
            "load_average": {"before": load_before, "after": os.getloadavg()},
        },
        figures=figures,
    )
    record.save(options.output)


if __name__ == "__main__":
    main()
