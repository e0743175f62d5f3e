"""The order of files in a run of two workers, and what a run writes down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations

ROOT = durations.ROOT


def test_the_longest_begin_first_and_unknown_ones_count_as_usual() -> None:
    seconds = {"a": 1.0, "b": 9.0, "c": 3.0, "gone": 2.0}
    places = durations.longest_first(["a", "new", "c", "b", "new", "a"], seconds)
    assert sorted(places, key=lambda file: places[file]) == ["b", "c", "new", "a"]
    assert durations.longest_first(["b", "a"], {}) == {"a": 0, "b": 1}


def test_no_file_is_so_long_that_one_worker_waits() -> None:
    """Turns red when a file takes longer than all others together would let a worker wait: it must
    be cut in two."""
    ends = [0.0, 0.0]
    took = durations.read_durations()
    for file in durations.longest_first(list(took), took):
        ends[ends.index(min(ends))] += took[file]
    assert max(ends) - min(ends) <= 0.02 * sum(took.values())


def test_files_are_sorted_so_that_a_new_measurement_reads_well() -> None:
    """Files renamed since the last measurement count as usual ones until the next."""
    took = durations.read_durations()
    assert list(took) == sorted(took)
    assert all(seconds >= 0 for seconds in took.values())


def test_workers_get_the_longest_files_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when workers run files by their names, when tests of a file change places, or when
    a run of one process does not go by names."""
    monkeypatch.setattr(durations, "read_durations", lambda: {"a.py": 1.0, "b.py": 9.0})
    names = ["a.py::test_2", "a.py::test_1", "b.py::test_0"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    alone: Any = SimpleNamespace()
    durations.pytest_collection_modifyitems(alone, items)
    assert [item.nodeid for item in items] == names
    worker: Any = SimpleNamespace(workerinput={})
    durations.pytest_collection_modifyitems(worker, items)
    assert [item.nodeid for item in items] == [names[2], *names[:2]]


def test_a_run_writes_what_its_files_took(tmp_path: Path) -> None:
    """The run is like that of `make test`. Turns red when a file that did not run loses its
    seconds, when workers write too, or when its two plugins do not go together."""
    record = tmp_path / "seconds.json"
    for name, wait in (("short", 0.0), ("long", 0.3)):
        body = f"import time\n\ndef test_it():\n    time.sleep({wait})\n"
        (tmp_path / f"test_{name}.py").write_text(body)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.durations", "-p", "tests.gates",
        "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
        "--record-durations", str(record), "-n", "2", "--dist", "loadfile",
        "--no-loadscope-reorder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept, before = json.loads(record.read_text()), durations.read_durations()
    took = {Path(name).name: kept[name] for name in set(kept) - set(before)}
    assert set(took) == {"test_short.py", "test_long.py"}
    assert took["test_long.py"] >= 0.3
    there = {name: took for name, took in before.items() if (ROOT / name).is_file()}
    assert {name: kept.get(name) for name in before} == {name: there.get(name) for name in before}


def test_the_slowest_of_rooms_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    took, gated = durations.read_durations(), "tests/ops/test_triton.py"
    durations.main([gated])
    assert capsys.readouterr().out.splitlines() == [
        f"{took[gated]:8.1f} s  {gated}",
        f"{took[gated]:8.1f} s  1 files",
        f"{took[gated]:8.1f} s  1 of them in groups of tests/gates.py",
    ]
    durations.main(["tests/server/"])
    *slowest, files, groups = capsys.readouterr().out.splitlines()
    assert len(slowest) == durations.NUM_SLOWEST
    assert all("tests/server/" in line for line in slowest)
    assert files.endswith(" files") and " s  2 of them in groups" in groups, "those of the page"
