"""Records that `make soak` keeps of a run; one variable multiplies the numbers of examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = """
from hypothesis import given, strategies as st
from tests.profiles import examples, machine_settings, seeds

@examples(7)
@given(st.integers(0, 10**9))
def test_property(number):
    pass

@machine_settings(examples=5)
@given(st.integers(0, 10**9))
def test_slow_property(number):
    pass

def test_simulation():
    assert seeds(3, first=10) == range(10, 10 + SEEDS)

def test_that_fails():
    raise AssertionError("as it should")
"""


@pytest.mark.parametrize(
    ("scale", "ci", "slow", "num_seeds"),
    [(1, {}, 5, 3), (4, {"CI": "1"}, 20, 12), (1, {"CI": "1"}, 2, 1)],
)
def test_the_record_of_a_soak(
    tmp_path: Path, scale: int, ci: dict[str, str], slow: int, num_seeds: int
) -> None:
    """slow: examples of what costs much, of which CI tries a third."""
    file, record = tmp_path / "test_few.py", tmp_path / "soak" / "few.json"
    file.write_text(TESTS.replace("SEEDS", str(num_seeds)))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.soak", "-p", "no:cacheprovider",
        "-c", str(ROOT / "pyproject.toml"), "--hypothesis-seed=9", "--soak-record", str(record),
        str(file),
    ]  # fmt: skip
    others = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        command, cwd=ROOT, env={**others, **ci, "QUIRE_SOAK": str(scale)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    kept = json.loads(record.read_text())
    tests = {name.rpartition("::")[2]: test for name, test in kept["tests"].items()}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_property": "passed",
        "test_slow_property": "passed",
        "test_simulation": "passed",
        "test_that_fails": "failed",
    }
    assert tests["test_property"]["examples"] == 7 * scale
    assert tests["test_slow_property"]["examples"] == slow
    assert kept["examples"] == 7 * scale + slow
    assert kept["outcomes"] == {"failed": 1, "passed": 3}
    assert (kept["seed"], kept["scale"], kept["exit_status"]) == ("9", scale, 1)
    assert kept["rooms"] == [str(file)]
    assert kept["seconds"] > 0
