"""Time that `quire serve` takes until its port answers, and until it serves; and how long one probe
had to wait for its answer meanwhile.

    python -m benchmarks.serving.server_start --output benchmarks/results/server_start.json

Over the bundled model, on a free port of this machine, with one front and with two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.arguments import command_line

from quire.entrypoints.bench.machine import current_commit, describe_machine

LIMIT_S = 60.0
PROBE = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def probe(port: int) -> int | None:
    """The status; None while nobody listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            connection.sendall(PROBE)
            answer = b""
            while data := connection.recv(65536):
                answer += data
    except ConnectionRefusedError:
        return None
    return int(answer.split(None, 2)[1])


def start(num_fronts: int) -> dict[str, float]:
    """One start, probed without a pause."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port)]
    command += ["--api-server-count", str(num_fronts), "--num-kv-blocks", "256"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    answers_s, slowest_s = 0.0, 0.0
    try:
        while (now := time.perf_counter()) - started < LIMIT_S:
            status = probe(port)
            if status is not None:
                end = time.perf_counter()
                slowest_s = max(slowest_s, end - now)
                answers_s = answers_s or end - started
                if status == 200:
                    return {
                        "answers_s": answers_s,
                        "ready_s": end - started,
                        "slowest_s": slowest_s,
                    }
            time.sleep(0.005)
        raise TimeoutError(f"not ready after {LIMIT_S:g} s")
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind (5)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for num_fronts in (1, 2):
        runs = [start(num_fronts) for _ in range(arguments.repeats)]
        found[f"fronts_{num_fronts}"] = {
            name: {
                "median": round(statistics.median(run[name] for run in runs), 3),
                "max": round(max(run[name] for run in runs), 3),
            }
            for name in runs[0]
        }
    print(json.dumps(found, indent=2))
    if arguments.output is not None:
        report = {
            "benchmark": "server_start",
            "command": " ".join(command_line()),
            "commit": current_commit(),
            "repeats": arguments.repeats,
            "machine": dataclasses.asdict(describe_machine()),
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "figures": found,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
