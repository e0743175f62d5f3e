"""One thread and two: the bundled model, alone and beside a busy program.

    python -m benchmarks.steps.threads_cpu [--rounds N] [--output FILE]

32 streams, output tokens per second. Each number of threads runs in a process of its own, by turns.
The busy program is one Python loop, ended by this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.arguments import command_line

from quire.entrypoints.bench.machine import current_commit, describe_machine

THREADS = (1, 2)

CHILD = """
import statistics, sys, time
from quire import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
rates = []
with LLM(quiet=True, num_threads=int(sys.argv[1]), enable_prefix_caching=False) as llm:
    for repeat in range(4):
        prompts = [[10 + repeat * 32 + stream] * 32 for stream in range(32)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(32 * 32 / (time.perf_counter() - start))
print(statistics.median(rates[1:]))
"""


@contextmanager
def busy_program(wanted: bool) -> Iterator[None]:
    """One core taken while the block runs, at the same priority."""
    if not wanted:
        yield
        return
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def output_rate(threads: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(threads)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write JSON here")
    options = parser.parse_args()
    commit = current_commit()
    rates: dict[tuple[bool, int], list[float]] = {}
    for _ in range(options.rounds):
        for busy in (False, True):
            with busy_program(busy):
                for threads in THREADS:
                    rates.setdefault((busy, threads), []).append(output_rate(threads))
    figures = [
        {
            "beside_a_busy_program": busy,
            "threads": threads,
            "output_tokens_per_s": statistics.median(values),
            "low": min(values),
            "high": max(values),
            "repeats": len(values),
        }
        for (busy, threads), values in rates.items()
    ]
    report = {
        "benchmark": "threads_cpu",
        "command": " ".join(command_line()),
        "commit": commit,
        "seed": 0,
        "machine": asdict(describe_machine()),
        "figures": figures,
    }
    print(json.dumps(figures, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
