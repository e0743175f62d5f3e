"""The figures of the paper at a hundredth, and the systems that it compares with."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.paper import systems
from benchmarks.paper.figure import Figure, Finding
from benchmarks.paper.figures import FIGURES, write_figure, write_table
from benchmarks.paper.paper import main
from benchmarks.paper.pool import RunPool
from benchmarks.paper.runs import (
    Curve,
    Outcome,
    Run,
    Scale,
    perform,
    perform_scaled,
    sustained_rate,
)

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.devices import device_named

SHORT = ("--rate", "1", "--seconds", "30")


@pytest.mark.parametrize("system", systems.SYSTEM_NAMES)
def test_every_system_reports_the_same_trace(
    capsys: pytest.CaptureFixture[str], system: str
) -> None:
    assert systems.main([system, *SHORT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["system"] == system
    assert report["requests"] == 30
    assert 0.01 < report["normalized_latency_s"] < 5


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert systems.main(["orca-max", "opt-12b"]) == 2
    assert "is no folder and not known" in capsys.readouterr().err
    assert main([str(tmp_path), "--figures", "11"]) == 2
    assert "Figure '11' is not known" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file" / "figures"), "--figures", "2"]) == 2
    assert "figures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("latencies", "rate"),
    [((0.1, 0.2, 0.3), 4.0), ((0.1, 0.25, 1.0), 2 * 2**0.5), ((0.1, 1.0, 0.2), 1.6233),
     ((0.6, 0.7, 0.8), 1.0)],
)  # fmt: skip
def test_a_sustained_rate_is_where_the_curve_crosses_the_limit(
    latencies: tuple[float, ...], rate: float
) -> None:
    """Turns red when the rate is read off the wrong place."""
    assert sustained_rate(list(zip((1.0, 2.0, 4.0), latencies, strict=True))) == pytest.approx(
        rate, rel=1e-4
    )


def test_a_curve_reaches_from_a_fifth_of_the_capacity_to_all_of_it() -> None:
    (curve,) = RunPool(1, 1.0).curves([Run("opt-13b", "orca-oracle", "sharegpt", seconds=20)])
    rates, latencies = zip(*curve.points, strict=True)
    assert rates[0] == pytest.approx(0.2 * curve.capacity)
    assert rates[-1] == curve.sustained == curve.capacity
    assert latencies[-1] > latencies[0] > 0


def test_equal_runs_are_simulated_once() -> None:
    """A saturated one is the same whatever the length of its trace. Turns red when figures that
    share runs pay for them again, or get those of others."""
    pool = RunPool(1, 1.0)
    first = Run("opt-13b", "orca-max", "sharegpt", seconds=5)
    waiting, longer, at_rate, other = pool.outcomes(
        [first, replace(first, seconds=9), replace(first, rate=1.0), replace(first, seed=1)]
    )
    assert waiting is longer
    assert waiting.memory["held"] > 0
    assert len({each.mean_running for each in (waiting, at_rate, other)}) == 3
    pool.close()


@pytest.mark.parametrize(
    "run",
    [Run("opt-13b", "orca-oracle", "sharegpt"),
     Run("opt-13b", "quire", "alpaca", n=2, is_search=True),
     Run("opt-66b", "faster-transformer", "alpaca")],
    ids=lambda run: run.system,
)  # fmt: skip
def test_one_simulation_serves_all_changes_of_a_constant(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when steps of a saturated run depend on how long they take, or when a part of
    their time is not that of the changed device."""
    monkeypatch.setattr("benchmarks.paper.runs.SATURATING", 0)  # 100 requests
    as_stated, scaled = perform_scaled(run, [("", 1.0), ("bytes_per_s", 1.2)])
    assert as_stated == perform(run)
    monkeypatch.setattr(
        "benchmarks.paper.runs.device_named",
        lambda name: device_named(name).scaled("bytes_per_s", 1.2),
    )
    assert replace(scaled, memory={}) == replace(perform(run), memory={})
    assert scaled.requests_per_s > 1.02 * as_stated.requests_per_s


def made_up(count: int) -> list[Outcome]:
    memory = {"held": 0.5, "reserved": 0.2, "internal": 0.2, "free": 0.1}
    return [
        Outcome(0.1, 2.0 + index, 3.0, 0, 0.1, 0.2, 0.3, 0.1, 0.02, 0.03, 0.25, memory)
        for index in range(count)
    ]


class MadeUpPool(RunPool):
    """Outcomes that nobody simulated, to try how figures are put together."""

    def outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
        return made_up(len(runs))

    def scaled(self, runs: Sequence[tuple[Run, tuple[Scale, ...]]]) -> list[list[Outcome]]:
        return [made_up(len(scales)) for _, scales in runs]

    def curves(self, runs: Sequence[Run]) -> list[Curve]:
        return [Curve(2.0, 1.0 + i, ((0.5, 0.1), (1.0, 0.6))) for i in range(len(runs))]


@pytest.mark.parametrize("key", FIGURES)
def test_every_figure_can_be_put_together_and_drawn(key: str, tmp_path: Path) -> None:
    """Turns red when a figure loses a run, or cannot be drawn."""
    figure = FIGURES[key](MadeUpPool(1, 0.01))
    write_figure(figure, tmp_path, 0.01)
    data = json.loads((tmp_path / f"figure_{key}.json").read_text())
    assert data["scale"] == 0.01
    assert Figure.from_json(data) == figure
    ElementTree.parse(tmp_path / f"figure_{key}.svg")
    assert figure.panels
    assert all(series.x for panel in figure.panels for series in panel.series)
    table = write_table(tmp_path, 0.01)
    assert table.count(f"\n| {key} |") == len(figure.findings)


def test_a_table_has_what_was_made_at_its_scale_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Turns red when a table forgets figures of earlier calls, or a cut-off call cuts it short."""
    for key, scale in (("2", 0.01), ("13", 0.01), ("policies", 1.0)):
        write_figure(FIGURES[key](MadeUpPool(1, 0.01)), tmp_path, scale)
    table = write_table(tmp_path, 0.01)
    assert [f"\n| {key} |" in table for key in ("2", "13", "policies")] == [True, True, False]
    (tmp_path / "figure_13.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        write_table(tmp_path, 0.01)
    assert (tmp_path / "table.md").read_text() == table
    assert not list(tmp_path.glob("*.new"))


def test_figures_are_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    table = tmp_path / "figures" / "table.md"
    table.parent.mkdir()
    table.symlink_to(tmp_path / "elsewhere" / "table.md")
    write_table(table.parent, 1.0)
    assert table.is_symlink() and table.read_text()


@pytest.mark.parametrize("key", ["2", "19", "budgets"])
def test_figures_are_written_with_their_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str
) -> None:
    """A hundredth of the traces. Turns red when a figure cannot be made or drawn."""
    assert main([str(tmp_path), "--figures", key, "--scale", "0.01", "--jobs", "1"]) == 0
    table = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == table
    data = json.loads((tmp_path / f"figure_{key}.json").read_text())
    root = ElementTree.parse(tmp_path / f"figure_{key}.svg").getroot()
    texts = " ".join(element.text or "" for element in root.iter())
    for panel in data["panels"]:
        assert panel["title"] in texts
        assert all(series["label"] in texts for series in panel["series"])
    assert all(finding["name"] in table for finding in data["findings"])
    assert key in FIGURES


@pytest.mark.parametrize(
    ("low", "high", "ours", "is_near", "words"),
    [
        (2.0, 2.0, 2.29, True, "2×"),
        (2.0, 2.0, 1.6, False, "2×"),
        (1.7, 2.7, 3.2, False, "1.7–2.7×"),
        (None, 22.0, 3.0, True, "at most 22×"),
        (96.0, None, 70.0, False, "at least 96×"),
        (None, None, 1.0, True, "–"),
    ],
)
def test_findings_are_near_within_15_percent(
    low: float | None, high: float | None, ours: float, is_near: bool, words: str
) -> None:
    finding = Finding("x", ours, low, high, "×")
    assert (finding.is_near, finding.paper) == (is_near, words)


def test_the_page_shows_what_the_committed_figures_say() -> None:
    """Turns red when figures are made again and docs/simulator.md is not."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "simulator.md").read_text(encoding="utf-8")
    text = (root / "benchmarks" / "results" / "paper" / "table.md").read_text(encoding="utf-8")
    table, of_constants = text.split("\n\n")
    assert len(of_constants.splitlines()) > 10
    made = {row[2]: row for row in ([c.strip() for c in r.split("|")] for r in table.splitlines())}
    lines = page.split("| headline | paper | here |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(lines) >= 5
    for line in lines:
        _, name, paper, ours, _ = (cell.strip() for cell in line.split("|"))
        assert made[name][3:5] == [paper, ours]
    assert all(row[6] for row in made.values() if row[5] == "no"), "a miss has no reason"
