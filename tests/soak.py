"""A plugin of pytest that keeps what a soak did: `pytest -p tests.soak --soak-record FILE`.

The file, of JSON: commit, seed, scale, duration, and of each test its outcome, its
seconds, what it gave to `record_property`, and, where hypothesis drives it, how many examples it
tried.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.statistics import collector, describe_statistics

from tests.profiles import SCALE

ROOT = Path(__file__).parents[1]

_EXAMPLES = re.compile(r"(\d+) passing[^,]*, (\d+) failing[^,]*,(?: and)? (\d+) invalid")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-record", type=Path, help="file to write the results to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--soak-record")
    if path is not None:
        config.pluginmanager.register(SoakRecord(path, config))


class SoakRecord:
    """Gathers the reports of a run and writes them at its end, also of one that failed."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        self._seed = config.getoption("hypothesis_seed", None)
        self._rooms = list(config.args)
        self._started = time.time()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._test(report.nodeid)
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.user_properties:
            test["figures"] = dict(report.user_properties)
        if report.outcome != "passed":
            test["outcome"] = report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Count what hypothesis tries; its own plugin notes that of a test, this of a state machine
        that a test drives."""
        texts: list[str] = []
        try:
            with collector.with_value(lambda stats: texts.append(describe_statistics(stats))):
                return (yield)
        finally:
            texts.append(getattr(item, "hypothesis_statistics", ""))
            tried = sum(map(examples_in, texts))
            if tried:
                self._test(item.nodeid)["examples"] = tried

    def _test(self, name: str) -> dict[str, Any]:
        return self._tests.setdefault(name, {"outcome": "passed", "seconds": 0.0})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        outcomes = [test["outcome"] for test in self._tests.values()]
        result = {
            "commit": _commit(),
            "rooms": self._rooms,
            "seed": self._seed,
            "scale": SCALE,
            "seconds": round(time.time() - self._started, 1),
            "exit_status": int(exitstatus),
            "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
            "examples": sum(test.get("examples", 0) for test in self._tests.values()),
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def examples_in(statistics: str) -> int:
    """Examples that hypothesis tried in all phases, by its statistics; invalid ones included."""
    return sum(sum(map(int, found)) for found in _EXAMPLES.findall(statistics))


def _commit() -> str:
    """Return the commit of the tree that ran, with a mark if it had changes; empty outside a
    repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
