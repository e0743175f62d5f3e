"""Processor time of a start without an engine: `from quire import LLM`, and `quire --help`.

    python -m benchmarks.serving.import_time --output benchmarks/results/import_time.json

Each start is a process of its own, after one that compiles the bytecode. Processor time is that of
user and system together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.arguments import command_line, positive_number

from quire.entrypoints.bench.machine import current_commit, describe_machine

STARTS = {
    "python": ("-c", "pass"),
    "numpy": ("-c", "import numpy"),
    "from_quire_import_llm": ("-c", "from quire import LLM"),
    "quire_help": ("-m", "quire", "--help"),
}
"""Arguments of Python by name; the first two are what any program with NumPy pays."""


def processor_seconds(arguments: tuple[str, ...]) -> float:
    """Run Python once, and return the processor time of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def num_modules() -> int:
    """Return the number of modules that `from quire import LLM` loads."""
    code = "import sys; from quire import LLM; print(len(sys.modules))"
    return int(subprocess.check_output([sys.executable, "-c", code]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive_number, default=15, help="of each start (15)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    load_before = os.getloadavg()
    runs: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(options.repeats + 1):
        for name, arguments in STARTS.items():
            seconds = processor_seconds(arguments)
            if number:
                runs[name].append(round(seconds, 4))
    figures = {
        name: {"minimum_s": min(each), "median_s": round(statistics.median(each), 4)}
        for name, each in runs.items()
    }
    print(json.dumps(figures, indent=2))
    if options.output is not None:
        report = {
            "benchmark": "import_time",
            "command": " ".join(command_line()),
            "commit": current_commit(),
            "repeats": options.repeats,
            "machine": dataclasses.asdict(describe_machine()),
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "num_modules": num_modules(),
            "figures": figures,
            "runs_s": runs,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
