"""Put one-line faults into a copy of the source, and see whether tests find them.

    python -m tools.mutations [--output benchmarks/results/mutations.json] [NAME …]

Each fault replaces a text that occurs once in its file. The rooms named with it are those in which
it should be found; they run as CI runs them, and the first failure ends a run. A fault that no test
finds makes the exit status 1. Faults in C++ compile the best kernels of this processor again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.base.platform import detect_platform
from quire.ops.native.binding import see_kernels

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Fault:
    """path: below src/quire. before, after: the text and its replacement. rooms: tests to run."""

    name: str
    path: str
    before: str
    after: str
    rooms: tuple[str, ...]


FAULTS = (
    Fault(
        "a length limit is one token late",
        "plan/scheduler/results.py",
        "has_room = len(token_ids) < group.max_total_tokens",
        "has_room = len(token_ids) <= group.max_total_tokens",
        ("tests/scheduler",),
    ),
    Fault(
        "rows that draw nothing count a token",
        "plan/scheduler/scheduler.py",
        "table.num_total[reached] += table.draws[reached]",
        "table.num_total[reached] += 1",
        ("tests/scheduler", "tests/engine/test_pooling_laws.py"),
    ),
    Fault(
        "the newest cached block is evicted first",
        "plan/kv_cache/pool.py",
        "islice(self._cached, count)",
        "islice(reversed(self._cached), count)",
        ("tests/kv_cache",),
    ),
    Fault(
        "block names of tenants are equal",
        "plan/kv_cache/hashing.py",
        'f"{self._weights_version}\\0{salt}"',
        'f"{self._weights_version}\\0"',
        ("tests/kv_cache", "tests/engine/test_block_names.py"),
    ),
    Fault(
        "a hit may need a window's block that is gone",
        "plan/kv_cache/prefix_lookup.py",
        "for i in range(group.blocks_for(num_tokens) - 1, first - 1, -1):",
        "for i in range(group.blocks_for(num_tokens) - 1, first, -1):",
        ("tests/kv_cache", "tests/engine/test_prefix_index.py"),
    ),
    Fault(
        "stops are banned for one token too many",
        "compute/sampling/edits.py",
        "if output_ids.size < edits.min_tokens:",
        "if output_ids.size <= edits.min_tokens:",
        ("tests/sampling",),
    ),
    Fault(
        "repetition is not punished over the prompt",
        "compute/sampling/edits.py",
        "seen = np.concatenate((prompt_ids, output_ids))",
        "seen = np.asarray(output_ids)",
        ("tests/sampling",),
    ),
    Fault(
        "a row that has left goes on computing",
        "compute/runner/rows.py",
        "self.standing[plan.leave] = 0",
        "self.standing[plan.leave] = 1",
        ("tests/runner", "tests/engine/test_fake_laws.py"),
    ),
    Fault(
        "late input of failed rows is never dropped",
        "compute/runner/late.py",
        "if known < step_id]:",
        "if known < 0]:",
        ("tests/runner",),
    ),
    Fault(
        "a key has one request more than it may have",
        "server/http/gate.py",
        "self._num_open[key] >= self._max_open",
        "self._num_open[key] > self._max_open",
        ("tests/server/test_gate.py", "tests/server/test_operations.py"),
    ),
    Fault(
        "an address that is mapped into IPv6 is not local",
        "server/http/gate.py",
        "address = address.ipv4_mapped",
        "address = address",
        ("tests/server/test_gate.py", "tests/server/test_operations.py"),
    ),
    Fault(
        "an included stop string is left out",
        "text/rendering/stop.py",
        "text[: end if self._include else end - len(stop)]",
        "text[: end - len(stop)]",
        ("tests/rendering",),
    ),
    Fault(
        "a look-up ignores tokens in flight",
        "plan/speculation/ngram.py",
        "return guess[num_in_flight:]",
        "return guess",
        ("tests/speculation",),
    ),
    Fault(
        "a captured step reads a block table that is one block short",
        "ops/csrc/rows/decode_inputs.cpp",
        "(block + 1) * sizeof(int32_t)",
        "block * sizeof(int32_t)",
        ("tests/ops/test_rows.py", "tests/ops/test_providers.py", "tests/engine/test_captured.py"),
    ),
    Fault(
        "two parts of a softmax are merged without the weight of one",
        "ops/csrc/attention/softmax.h",
        "total.sum[row] * ours[0] + part.sum[row] * theirs[0]",
        "total.sum[row] * ours[0] + part.sum[row]",
        ("tests/ops/test_paged_attention.py", "tests/ops/test_providers.py"),
    ),
)


_QUIETLY = ("-q", "-x", "-p", "no:cacheprovider")


def find(fault: Fault, copy: Path) -> dict[str, object]:
    """Put the fault into `copy`, run its rooms, and take it out again. The test that fails has to
    pass then."""
    path = copy / "src" / "quire" / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.path} has {fault.before!r} {text.count(fault.before)} times.")
    started = time.monotonic()
    environment = {**os.environ, "CI": "1", "PYTHONPATH": str(copy / "src")}

    def run(source: str, rooms: Sequence[str]) -> str:
        path.write_text(source, encoding="utf-8")
        if path.suffix in (".cpp", ".h"):
            best = see_kernels(detect_platform()).kernels[0]
            made = _run(copy, environment, "-m", "quire.ops.compile", "--isa", best)
            if made.returncode:
                raise SystemExit(f"{fault.name}: it does not compile\n{made.stderr}")
        return _run(copy, environment, "-m", "pytest", *_QUIETLY, *rooms).stdout

    printed = run(text.replace(fault.before, fault.after), fault.rooms)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    again = run(text, [found[1]]) if found else ""
    if not found:
        path.write_text(text, encoding="utf-8")
    elif not re.search(r"^1 passed", again, re.MULTILINE):
        raise SystemExit(f"{found[1]} fails without {fault.name!r} too\n{again}")
    return {
        "fault": fault.name,
        "file": f"src/quire/{fault.path}",
        "line": f"{fault.before} → {fault.after}",
        "found_by": found[1] if found else None,
        "seconds": round(time.monotonic() - started, 1),
    }


def _run(
    copy: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    parser.add_argument("names", nargs="*", help="parts of names of faults; all if none is given")
    given = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not given.names or any(part in fault.name for part in given.names)
    ]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "quire"
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", "results", ".pytest_cache")
        shutil.copytree(ROOT, copy, ignore=skipped)
        for fault in chosen:
            results.append(find(fault, copy))
            print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    if given.output is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        document = {"commit": commit.stdout.strip(), "faults": results}
        given.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return int(any(each["found_by"] is None for each in results))


if __name__ == "__main__":
    sys.exit(main())
