"""Compare two lists of tests: functions that lost cases, and the places where these are now.

    export CI=1
    pytest --collect-only -q > before.txt                  # of the commit before
    pytest --collect-only -q -p tests.gates > after.txt
    pytest --collect-only -q > gate.txt                    # with the groups that gates leave out
    QUIRE_SOAK=2 pytest --collect-only -q > soak.txt
    python -m tools.lost_tests before.txt after.txt gate=gate.txt soak=soak.txt

Each line is of one function: its cases before and after, and of the lost ones how many are in which
further list, the first that has them. A case that is in none counts as `table` if its function, or
one of that name elsewhere, has cases left: they were merged. Ends with status 1 if any is gone.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["lost", "main", "read"]

GONE = "gone"
Cases = Mapping[str, set[str]]
"""Whole names of cases by those of their functions."""


def read(lines: Sequence[str]) -> Cases:
    """Take what `pytest --collect-only -q` prints."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        path, _, test = line.strip().partition("::")
        if test and path.endswith(".py"):
            found[f"{path}::{test.partition('[')[0]}"].add(f"{path}::{test}")
    return found


def lost(before: Cases, after: Cases, places: Mapping[str, Cases]) -> dict[str, Counter[str]]:
    """Return how many lost cases of each function are where. places: further lists by name."""
    lists = (*places.values(), after)
    left = {name.rpartition("::")[2]: name for cases in lists for name in cases}
    found: dict[str, Counter[str]] = {}
    for name, cases in before.items():
        where: Counter[str] = Counter()
        for case in cases - after.get(name, set()):
            place = next((p for p, known in places.items() if case in known.get(name, ())), None)
            if place is None:
                other = name if name in after else left.get(name.rpartition("::")[2])
                place = GONE if other is None else "table"
                place += f" of {other}" * (other not in (None, name))
            where[place] += 1
        if where:
            found[name] = where
    return found


def main(arguments: Sequence[str]) -> int:
    named = dict(each.split("=", 1) for each in arguments[2:])
    before, after, *others = (
        read(Path(path).read_text(encoding="utf-8").splitlines())
        for path in (*arguments[:2], *named.values())
    )
    total: Counter[str] = Counter()
    for name, where in sorted(lost(before, after, dict(zip(named, others, strict=True))).items()):
        now = ", ".join(f"{count} in {place}" for place, count in where.most_common())
        print(f"{name}: {len(before[name])} -> {len(after.get(name, ()))}: {now}")
        for place, count in where.items():
            total[place.partition(" ")[0]] += count
    sizes = [sum(map(len, cases.values())) for cases in (before, after)]
    sums = ", ".join(f"{count} in {place}" for place, count in total.most_common())
    print(f"{sizes[0]} cases before, {sizes[1]} after; lost ones: {sums or 'none'}")
    return int(bool(total[GONE]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
