"""Comparison of what quire offers, entry by entry."""

from __future__ import annotations

from tools.public_surface import differences


def test_each_difference_has_a_line():
    before = {"name quire.LLM": "", "setting S.seed": "int = 0", "metric steps": "counter"}
    now = {"name quire.LLM": "", "setting S.seed": "int = 1", "route GET /health": "200"}
    assert list(differences(before, now)) == [
        "gone metric steps: counter",
        "differs setting S.seed: int = 0 before, int = 1 now",
        "new route GET /health: 200",
    ]


def test_equal_surfaces_have_no_difference():
    assert not list(differences({"metric steps": "counter"}, {"metric steps": "counter"}))
