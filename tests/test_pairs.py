"""Covers of pairs hold every pair, and a soak runs the product."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tools.lost_tests import lost, read

from tests.pairs import Case, cover, pairs_of

ROOT = Path(__file__).parents[1]

LAWS = """
import pytest
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS
BY_DEPTH = pytest.mark.parametrize("depth", [1, 2, 3])

@pytest.fixture(params=["dense", "moe", "mixed"])
def model(request):
    return request.param

@BY_DEPTH
@pytest.mark.parametrize("budget", [8, 64])
def test_chunked(model, depth, budget): ...

@BY_DEPTH
def test_preempted(model, depth): ...

@BY_DEPTH
def test_alone(depth): ...

def test_plain(): ...
"""
TESTS = """
import pytest
from tests.pairs import BY_PAIRS

@BY_PAIRS
@pytest.mark.parametrize(("dtype", "size"), [("float32", 1), ("float32", 2), ("float16", 1)])
@pytest.mark.parametrize("rows", [{}, {"n": 1}, {"n": 2}])
@pytest.mark.parametrize("draws", [False, True, None])
def test_sums(dtype, size, rows, draws): ...

class Kernel:
    def __init__(self, why): self.why = why
    def unavailable(self, platform): return self.why

@BY_PAIRS
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2])
@pytest.mark.parametrize("kernel", [Kernel(None), Kernel("not here")])
def test_kernels(kernel, x, y): ...

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2])
@pytest.mark.parametrize("z", [1, 2])
def test_of_all(x, y, z): ...
"""
COUNTS = {
    "test_sums": [27, 11], "test_of_all": [8, 8], "test_alone": [3, 3], "test_plain": [1, 1],
    "test_kernels": [8, 8],
}  # fmt: skip
"""Cases of each test, and those that run: all pairs without the kernel that is not here, too."""
LAW = ("test_chunked", "test_preempted")


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4), st.data())
def test_every_pair_that_may_occur_does(sizes: list[list[int]], data: st.DataObject) -> None:
    """Some combinations may be forbidden."""
    names = "abcd"[: len(sizes)]
    product = [Case(zip(names, values, strict=True)) for values in itertools.product(*sizes)]
    cases = [case for case in product if data.draw(st.integers(0, 3))]
    kept = cover(cases)
    assert kept == sorted(set(kept)) == cover(cases)
    wanted = {pair for case in cases for pair in pairs_of(case)}
    assert {pair for i in kept for pair in pairs_of(cases[i])} == wanted


def test_a_cover_of_many_values_is_small() -> None:
    product = itertools.product(range(6), range(3), range(3), range(2), range(5))
    assert len(cover([Case(zip("abcde", values, strict=True)) for values in product])) <= 36


def collected(*places: str | Path, soak: int = 1) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.pairs", "-c", str(ROOT / "pyproject.toml"), *map(str, places)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "QUIRE_SOAK": str(soak), "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_marked_tests_run_pairs_and_a_soak_all(tmp_path: Path) -> None:
    """Turns red when a pair of values of laws, model and depth is left out, another test loses a
    case, a soak leaves out anything, or a case does not run that is asked for by its name."""
    laws = tmp_path / "test_laws.py"
    laws.write_text(LAWS)
    (tmp_path / "test_few.py").write_text(TESTS)
    kept, product = collected(tmp_path), collected(tmp_path, soak=2)
    assert [name for name in product if name in kept] == kept
    for test, counts in COUNTS.items():
        found = [[name for name in names if name.startswith(test)] for names in (product, kept)]
        assert [len(names) for names in found] == counts, test
    all_laws, few_laws = ([n for n in each if n.startswith(LAW)] for each in (product, kept))

    def pairs(names: list[str]) -> set[Hashable]:
        values = [name.removesuffix("]").replace("[", "-").split("-") for name in names]
        return {pair for each in values for pair in itertools.combinations(sorted(each), 2)}

    assert pairs(few_laws) == pairs(all_laws)
    assert (len(all_laws), len(few_laws)) == (27, 10)
    left_out = next(name for name in all_laws if name not in kept)
    assert collected(f"{laws}::{left_out}") == [left_out]


def test_cases_that_a_run_lost_are_found_again() -> None:
    """Turns red when a test can vanish unseen."""
    before = read(
        ["tests/a.py::test_x[1]", "tests/a.py::test_x[2-y]", "tests/a.py::test_z", "2 tests"]
    )
    soak = {"soak": before}
    assert lost(before, before, soak) == {}
    after = read(["tests/a.py::test_x[1]", "tests/b.py::test_z"])
    x, z = "tests/a.py::test_x", "tests/a.py::test_z"
    assert lost(before, after, soak) == {x: {"soak": 1}, z: {"soak": 1}}
    assert lost(before, after, {}) == {x: {"table": 1}, z: {"table of tests/b.py::test_z": 1}}
    assert lost(before, read([]), {}) == {x: {"gone": 2}, z: {"gone": 1}}
