"""All figures, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from quire.errors import ConfigError
from quire.simulator.paper.ablations import (
    figure_18b,
    figure_19,
    figure_budgets,
    figure_policies,
)
from quire.simulator.paper.constants import figure_constants
from quire.simulator.paper.figure import Figure
from quire.simulator.paper.memory import figure_2, figure_13, figure_15
from quire.simulator.paper.pool import RunPool
from quire.simulator.paper.rates import figure_12, figure_14, figure_16, figure_17
from quire.simulator.paper.svg import draw_figure

__all__ = ["FIGURES", "make_figures", "render_table", "write_figures"]

FIGURES: Mapping[str, Callable[[RunPool], Figure]] = {
    "2": figure_2,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18b": figure_18b,
    "19": figure_19,
    "policies": figure_policies,
    "budgets": figure_budgets,
    "constants": figure_constants,
}
"""Figures by name, in the order in which they are made."""


def make_figures(keys: Sequence[str], *, jobs: int, scale: float) -> Iterator[Figure]:
    """Simulate figures, `jobs` runs at a time, and give each when it is there. scale: of traces'
    lengths. ConfigError if there is no such figure."""
    unknown = [key for key in keys if key not in FIGURES]
    if unknown:
        raise ConfigError(
            f"Figure {unknown[0]!r} is not known. Give some of: {', '.join(FIGURES)}."
        )
    pool = RunPool(jobs, scale)
    with ThreadPoolExecutor(len(keys)) as makers:  # they wait for runs
        try:
            made = [makers.submit(FIGURES[key], pool) for key in keys]
            for future in as_completed(made):
                yield future.result()
        finally:
            pool.close()


def write_figures(figures: Sequence[Figure], folder: Path, scale: float) -> None:
    """Write an SVG and a JSON file for each figure, and a table of all headlines. scale: with which
    they were made. ConfigError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            stem = folder / f"figure_{figure.key}"
            stem.with_suffix(".svg").write_text(draw_figure(figure), encoding="utf-8")
            text = json.dumps({"scale": scale, **figure.as_json()}, indent=1)
            stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        (folder / "table.md").write_text(render_table(figures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"Figures cannot be written to {folder} ({error.strerror}). Give another folder."
        ) from error


def render_table(figures: Iterable[Figure]) -> str:
    """All headlines as a table of Markdown, and then those by changed constant."""
    figures = sorted(figures, key=lambda figure: list(FIGURES).index(figure.key))
    lines = [
        "| figure | headline | paper | here | within 15 % | why not |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        for each in figure.findings:
            is_given = each.low is not None or each.high is not None
            near = ("yes" if each.is_near else "no") if is_given else "–"
            why = "" if each.is_near else each.why
            ours = f"{each.ours:.3g}{each.unit}"
            lines.append(f"| {figure.key} | {each.name} | {each.paper} | {ours} | {near} | {why} |")
    for figure in figures:
        if figure.key == "constants":
            lines += ["", *_table_of_bars(figure)]
    return "\n".join([*lines, ""])


def _table_of_bars(figure: Figure) -> list[str]:
    """Lines of a table with a row for each panel, whose bars have the same names."""
    names = figure.panels[0].series[0].x
    lines = [f"| headline | {' | '.join(map(str, names))} |", "|---" * (len(names) + 1) + "|"]
    for panel in figure.panels:
        values = " | ".join(f"{value:.3g}" for value in panel.series[0].y)
        lines.append(f"| {panel.title} | {values} |")
    return lines
