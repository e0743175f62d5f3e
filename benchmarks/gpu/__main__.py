"""Everything that is claimed of GPUs, on a machine with one: correct, exact, fast.

    python -m benchmarks.gpu [--parts NAME ...] [--quick] [--seconds S] [--output FILE]

Each part (`--list`) runs in a process of its own with a time limit, and the file is written anew
after each, so that a part that hangs or breaks loses nothing but what it had not found yet.
`--seconds` ends the whole: a part gets what is left, and none begins after. `--device cpu` is a dry
run with tiny sizes, for mistakes that need no GPU to be found; its figures mean nothing.
Ends with 1 when something was wrong or did not end well, with 3 and no file without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.arguments import command_line
from benchmarks.gpu import PARTS

SEED = 0
MODULE = "benchmarks.gpu"
"""This package: each part runs in a process of its own as `python -m` of it."""
NO_GPU = 3
"""Exit status of a part that needs one."""
SHOWN_ERROR = 4000
"""Characters of what a part that broke said last."""


def main() -> None:
    """Run the parts, or be one of them."""
    options = parse_arguments()
    if options.findings is not None:
        run_part(options)
        return
    if options.list:
        for name, info in PARTS.items():
            print(f"{name:22s} at most {info.seconds:3d} s: {info.about}")
        return
    ends = time.monotonic() + options.seconds
    report = describe(options)
    wrong = 0
    for name in options.parts:
        if options.device == "cpu" and PARTS[name].needs_gpu:
            report["parts"][name] = {"status": "left out of a dry run", "findings": []}
            continue
        limit = min(PARTS[name].seconds, ends - time.monotonic())
        if limit < 5:
            report["parts"][name] = {"status": "not begun: no time was left", "findings": []}
            wrong += 1
            continue
        outcome = run_apart(name, limit, options)
        report["machine"] = outcome.pop("machine") or report["machine"]
        report["parts"][name] = outcome
        if outcome["status"] == f"failed with {NO_GPU}":
            sys.exit(NO_GPU)  # which no other part would find either
        wrong += outcome["status"] != "done" or not all_held(outcome)
        if options.output:
            write(options.output, report)
    print_summary(report)
    sys.exit(1 if wrong else 0)


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments of the whole run and of a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all parts together")
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)  # this is a part
    return parser.parse_args()


def run_part(options: argparse.Namespace) -> None:
    """In this process."""
    import torch

    from benchmarks.gpu.part import Part, machine_facts

    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU (`quire doctor` says why); a dry run needs --device cpu")
        sys.exit(NO_GPU)
    torch.manual_seed(SEED)
    part = Part(torch.device(options.device), options.quick, SEED, options.findings)
    part.keep_facts(machine_facts())
    module, _, function = PARTS[options.parts[0]].function.partition(":")
    with torch.inference_mode():
        getattr(import_module(f"{MODULE}.{module}"), function)(part)


def run_apart(name: str, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Status, seconds, findings, and the end of what it printed if it broke."""
    print(f"--- {name}, at most {limit:.0f} s", flush=True)
    command = [sys.executable, "-m", MODULE, "--parts", name, "--device", options.device]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings, printed = Path(folder) / "findings", Path(folder) / "printed"
        command += ["--findings", str(findings), *(["--quick"] if options.quick else [])]
        status = run_limited(command, limit, printed)
        text = printed.read_text(encoding="utf-8", errors="replace")
        lines = findings.read_text(encoding="utf-8").splitlines() if findings.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    outcome: dict[str, Any] = {
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "machine": next((each["facts"] for each in found if each["kind"] == "facts"), None),
        "findings": [each for each in found if each["kind"] != "facts"],
    }
    print(text if status != "done" else text[-200_000:], flush=True)
    if status != "done":
        print(f"--- {name}: {status}", flush=True)
        outcome["printed"] = text[-SHOWN_ERROR:]
    return outcome


def run_limited(command: Sequence[str], limit: float, printed: Path) -> str:
    """Run a command and return how it ended. At the limit it and all that it started are ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with printed.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"ended after {limit:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return "done" if code == 0 else f"failed with {code}"


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """All that is known before a part runs. Which GPU it is each part notes itself, so that this
    process keeps no memory of it."""
    from quire.entrypoints.bench.machine import current_commit

    return {
        "benchmark": "gpu",
        "command": " ".join(command_line()),
        "commit": current_commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "seed": SEED,
        "machine": None,
        "parts": {},
    }


def all_held(outcome: dict[str, Any]) -> bool:
    """Return whether every check of a part held."""
    return all(each["ok"] for each in outcome["findings"] if each["kind"] == "check")


def print_summary(report: dict[str, Any]) -> None:
    """Short, and last: the ends of the parts, their faults, and the figures that have a goal."""
    print("=== summary")
    for name, outcome in report["parts"].items():
        checks = [each for each in outcome["findings"] if each["kind"] == "check"]
        held = sum(each["ok"] for each in checks)
        print(f"{name:22s} {outcome['status']}, {held} of {len(checks)} checks held")
        for each in checks:
            if not each["ok"]:
                print(f"  WRONG {each['name']}: {(each['failures'] or ['?'])[0][:300]}")
        for each in outcome["findings"]:
            if each["kind"] == "figure" and each["goal"] is not None:
                print(f"  {each['name']}: {each['median']:,.0f} {each['unit']}", end="")
                print(f" (goal {each['goal']:,.0f})")


def write(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    main()
