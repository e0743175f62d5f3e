"""The few cases of a product of parameters in which every pair of values occurs.

`@BY_PAIRS` stands on one test; `pytestmark = LAWS_BY_PAIRS` makes all tests of a module that have
parameters one table, in which the test is a value too: each meets each value of its parameters, and
each two values of two parameters meet in some test. The rest of the product is deselected, except
where `QUIRE_SOAK` is above 1 (`tests/profiles.py`) or one case is asked for by its name. What goes
wrong only when three values meet is for a soak to find.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence

import pytest

from quire.base.platform import Platform, detect_platform
from tests.profiles import SCALE

__all__ = ["BY_PAIRS", "LAWS_BY_PAIRS", "cover", "pairs_of"]

BY_PAIRS = pytest.mark.pairs
LAWS_BY_PAIRS = pytest.mark.pairs(of="module")

Case = dict[str, Hashable]
"""Values by the names of parameters."""


def pairs_of(case: Case, size: int = 2) -> list[Hashable]:
    """Return what a case shows: each `size` of its values, or all where there are fewer."""
    return list(itertools.combinations(case.items(), min(size, len(case))))


def cover(cases: Sequence[Case], size: int = 2) -> list[int]:
    """Return places of the cases to keep, in order: in these occurs every pair that occurs in any.

    Greedy: the next one has most pairs that are still missing, the first one of several. size: 1
    for single values instead of pairs.
    """
    missing = {i: set(pairs_of(case, size)) for i, case in enumerate(cases)}
    kept: list[int] = []
    while missing:
        best = max(missing, key=lambda i: len(missing[i]))
        if not (found := missing.pop(best)):
            break
        kept.append(best)
        for pairs in missing.values():
            pairs -= found
    return sorted(kept)


def case_of(item: pytest.Function, of_module: bool) -> Case:
    """Values of an item. Those of two tests are the same if they are equal and of one type, or one
    object."""
    case: Case = {"test": item.nodeid.partition("[")[0]} if of_module else {}
    for name, value in item.callspec.params.items():
        try:
            hash(value)
        except TypeError:
            case[name] = id(value)
        else:
            case[name] = (type(value), value)
    return case


def is_skipped(item: pytest.Function) -> bool:
    """Return whether one of its values is a kernel that this machine does not have."""
    for value in item.callspec.params.values():
        for part in value if isinstance(value, tuple) else (value,):
            unavailable = getattr(type(part), "unavailable", None)  # of a `Provider`
            if callable(unavailable) and unavailable(part, _platform()) is not None:
                return True
    return False


@functools.cache
def _platform() -> Platform:
    return detect_platform()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairs(of): run pairs of parameters, see tests/pairs.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but a cover, module by module and test by test."""
    if SCALE > 1:
        return
    tables: dict[str, list[tuple[pytest.Item, Case]]] = {}
    for item in items:
        mark = item.get_closest_marker("pairs")
        if mark is None or not hasattr(item, "callspec"):
            continue
        assert isinstance(item, pytest.Function)
        path, _, test = item.nodeid.partition("[")[0].partition("::")
        of_module = mark.kwargs.get("of") == "module"
        name = path if of_module else f"{path}::{test}"
        name += " skipped" * is_skipped(item)  # what others alone show must run, too
        tables.setdefault(name, []).append((item, case_of(item, of_module)))
    dropped: set[pytest.Item] = set()
    for table in tables.values():
        kept = set(cover([case for _, case in table]))
        dropped.update(item for i, (item, _) in enumerate(table) if i not in kept)
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
