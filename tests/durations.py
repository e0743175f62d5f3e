"""A plugin of pytest that knows how long each file takes: `pytest -n 2 -p tests.durations`.

`tests/durations.json` has the seconds of each file. In workers of xdist the longest files begin
first, so that no long one is left for the end. `--record-durations FILE` writes a run's own seconds
over those. `python -m tests.durations` prints the slowest files.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_suffix(".json")
NUM_SLOWEST = 10


def read_durations() -> dict[str, float]:
    """Return the seconds of each file, by its path in the checkout."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


def longest_first(files: Sequence[str], seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the place of each file in a run. Files that nobody has measured count as a usual one,
    and equally long ones go by their names."""
    usual = median(seconds.values()) if seconds else 0.0
    ordered = sorted(set(files), key=lambda file: (-seconds.get(file, usual), file))
    return {file: place for place, file in enumerate(ordered)}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", type=Path, help="file to write seconds of files to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record-durations")
    if path is not None and not is_worker(config):
        config.pluginmanager.register(DurationRecord(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):
        places = longest_first([file_of(item.nodeid) for item in items], read_durations())
        items.sort(key=lambda item: places[file_of(item.nodeid)])


def is_worker(config: pytest.Config) -> bool:
    """Return True in a process that xdist has started."""
    return hasattr(config, "workerinput")


class DurationRecord:
    """Sums what the tests of a file took, and writes it at the end of the run. Files that did not
    run keep their seconds; those that are gone lose them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: took for name, took in read_durations().items() if (ROOT / name).is_file()}
        measured = {name: round(took, 1) for name, took in self._seconds.items()}
        text = json.dumps({**kept, **measured}, indent=0, sort_keys=True)
        self._path.write_text(text + "\n", encoding="utf-8")


def main(rooms: Sequence[str]) -> None:
    """Print the slowest files of the rooms, which are folders or files, what all of them take, and
    what those take that gates may leave out."""
    from tests.gates import GATES, files_of  # a plugin too, which pytest wants to import itself

    wanted = tuple(room.rstrip("/") for room in rooms) or ("tests",)
    found = {
        name: took
        for name, took in read_durations().items()
        if any(name == room or name.startswith(f"{room}/") for room in wanted)
    }
    slowest = sorted(found, key=lambda name: -found[name])[:NUM_SLOWEST]
    lines = [f"{found[name]:8.1f} s  {name}" for name in slowest]
    groups = {path.relative_to(ROOT).as_posix() for each in GATES for path in files_of(each.tests)}
    gated = [took for name, took in found.items() if name in groups]
    lines += [
        f"{sum(found.values()):8.1f} s  {len(found)} files",
        f"{sum(gated):8.1f} s  {len(gated)} of them in groups of tests/gates.py",
    ]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
