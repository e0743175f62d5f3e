"""All figures, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.paper.ablations import (
    figure_18b,
    figure_19,
    figure_budgets,
    figure_policies,
)
from benchmarks.paper.constants import figure_constants
from benchmarks.paper.figure import Figure
from benchmarks.paper.memory import figure_2, figure_13, figure_15
from benchmarks.paper.pool import RunPool
from benchmarks.paper.rates import figure_12, figure_14, figure_16, figure_17

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.entrypoints.simulator.svg import draw_figure

__all__ = [
    "FIGURES",
    "check_folder",
    "make_figures",
    "render_table",
    "write_figure",
    "write_table",
]

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
    """Simulate figures, `jobs` runs at a time, and give each when it is there. scale: factor on
    traces' lengths. ConfigError if there is no such figure."""
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


def check_folder(folder: Path, keys: Iterable[str]) -> None:
    """ConfigError if the files of these figures cannot be written."""
    names = [f"figure_{key}.{kind}" for key in keys for kind in ("svg", "json")]
    for name in (*names, "table.md"):
        check_output("A file of the figures", folder / name, makes_folder=True)


def write_figure(figure: Figure, folder: Path, scale: float) -> None:
    """Write an SVG and a JSON file. scale: scale of the figure. ConfigError if the folder
    cannot be written."""
    text = json.dumps({"scale": scale, **figure.as_json()}, indent=1) + "\n"
    _write(folder / f"figure_{figure.key}.svg", draw_figure(figure))
    _write(folder / f"figure_{figure.key}.json", text)


def write_table(folder: Path, scale: float) -> str:
    """Write a table of the headlines of all figures in a folder that were made with this scale, and
    return it. ConfigError if the folder cannot be read or written."""
    try:
        files = [folder / f"figure_{key}.json" for key in FIGURES]
        data = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]
        table = render_table(Figure.from_json(each) for each in data if each["scale"] == scale)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Figures in {folder} cannot be read ({error}). Give an empty folder."
        ) from error
    _write(folder / "table.md", table)
    return table


def _write(path: Path, text: str) -> None:
    """Write a file as a whole: an interrupted run leaves the one that was there."""
    output = check_output("A file of the figures", path, makes_folder=True)
    staged = output.path.with_name(f"{output.path.name}.new")
    try:
        output.path.parent.mkdir(parents=True, exist_ok=True)
        if output.is_stream:
            output.write(text)
            return
        staged.write_text(text, encoding="utf-8")
        staged.replace(output.path)
    except OSError as error:
        raise ConfigError(
            f"Figures cannot be written to {path.parent} ({error.strerror}). Give another folder."
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
