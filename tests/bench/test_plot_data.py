"""The plots of the documentation: all that they show is in the committed results."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("peers", "block_sharing", "recovery", "shared_prefix", "policies", "kv_waste", "grpo")


@pytest.fixture
def plot_data() -> Any:
    return importlib.import_module("benchmarks.plot_data")


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_reads_the_committed_results(plot_data: Any, name: str) -> None:
    """Turns red when a benchmark's figures change their names, or a series loses a point."""
    plot = plot_data.PLOTS[name]()
    assert (plot_data.RESULTS / plot.source).is_file()
    for panel in plot.panels:
        labels = [series.label for series in panel.series]
        assert len(set(labels)) == len(labels) > 0
        for series in panel.series:
            assert len(series.x) == len(series.y) >= 3
            assert all(math.isfinite(value) and value > 0 for value in series.y)
            assert all(isinstance(value, str) for value in series.x) or (
                list(series.x) == sorted(series.x)
            )


def test_every_plot_is_drawn_and_shown(plot_data: Any) -> None:
    """Turns red when a plot is not committed, or its page does not show it."""
    pages = ("benchmarks.md", "training.md")
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    assert tuple(plot_data.PLOTS) == NAMES
    drawn = {path.stem for path in (ROOT / "docs" / "plots").glob("*.svg")}
    assert drawn == set(NAMES)
    assert all(f"(plots/{name}.svg)" in text for name in NAMES)


def test_bars_of_few_bits_say_their_quality(plot_data: Any) -> None:
    """Turns red when a bar of an engine with rounded weights lacks its own quality."""
    *few, _ = plot_data.PLOTS["peers"]().panels
    figures = plot_data.read_figures("peer_quality.json")
    for panel in few:
        kind = "INT8" if "8-bit" in panel.title else "Q4_1"
        for series in panel.series:
            engine = series.label.partition(" (")[0]
            ours = "int8" if kind == "INT8" and engine == "quire" else kind
            assert series.label == f"{engine} (KL {figures[f'{engine}, {ours}: KL']:.4f})"


def test_a_drawing_shows_the_numbers_of_the_results(plot_data: Any) -> None:
    """Turns red when results are committed without drawing their plots again: bars carry their
    values as text."""
    for name in ("peers", "block_sharing", "policies"):
        drawing = (ROOT / "docs" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        for panel in plot_data.PLOTS[name]().panels:
            for series in panel.series:
                shows = all(f">{plot_data.shown(value)}<" in drawing for value in series.y)
                shows &= len(panel.series) == 1 or f">{series.label}<" in drawing
                assert shows, f"{name}.svg is old: python -m benchmarks.plots, with quire[plots]"
