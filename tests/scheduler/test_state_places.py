"""Places in prompts where recurrent states are kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.plan.scheduler.states.places import GAP, STRIDE, places_of, spaced
from tests.profiles import examples

GRID = 16


def places(num_tokens: int, ends: list[int] | None = None, **others: int) -> list[int]:
    found = spaced(np.array(ends or [], np.int32), GRID, GAP)
    return places_of(found, num_tokens, GRID, GAP, **others)


@pytest.mark.parametrize(
    ("num_tokens", "ends", "expected"),
    [
        (16, [], []),
        (17, [], [16]),
        (100, [], [96]),
        (96, [], [80]),
        (1000, [], [928]),
        (1530, [1500, 1502, 1520, 1522], [1488]),
        (1900, [1500, 1502, 1890, 1892], [1488, 1888]),
        (1900, [1500, 1502, 1700, 1702, 1780, 1782, 1890], [1488, 1776, 1888]),
        (10000, [], [4096, 8192, 9936]),
        (30000, [], [12288, 24576, 28672, 29936]),
    ],
)
def test_the_rule(num_tokens: int, ends: list[int], expected: list[int]) -> None:
    assert places(num_tokens, ends) == expected


def test_a_short_rest_is_not_cut_again() -> None:
    assert places(1530, [1500], start=1488) == []
    assert places(1600, [1500], start=1488) == []
    assert places(1640, [1500], start=1488) == [1568]
    assert places(1600, [1500, 1590], start=1488) == [1584]
    assert places(150, start=96) == []


def test_a_branch_is_a_place_and_others_near_it_are_none() -> None:
    assert places(1900, [1500, 1890], branch=1520) == [1520, 1888]
    assert places(1900, [1500, 1890], branch=1888) == [1488, 1888]


def test_a_later_turn_has_the_first_places_of_the_one_before() -> None:
    ends = list(range(90, 4000, 37))
    for count in range(1, len(ends)):
        shorter, longer = (
            spaced(np.array(ends[:n], np.int32), GRID, GAP) for n in (count, count + 1)
        )
        assert longer[: len(shorter)] == shorter


@examples(200)
@given(
    num_tokens=st.integers(1, 140_000),
    ends=st.lists(st.integers(0, 140_000), max_size=60),
    start=st.integers(0, 8000),
    branch=st.integers(0, 8000),
)
def test_places_are_few_apart_and_on_the_grid(
    num_tokens: int, ends: list[int], start: int, branch: int
) -> None:
    start, branch = start * 16, branch * 16
    branch = branch if branch < num_tokens else 0
    found = places(num_tokens, sorted(ends), start=start, branch=branch)
    assert found == sorted(set(found))
    assert len(found) <= 10
    assert all(place % GRID == 0 and start < place < num_tokens for place in found)
    assert all(b - a >= GAP for a, b in pairwise(found))
    if num_tokens > start + 2 * STRIDE:
        assert found, "a long rest is computed without a place"
