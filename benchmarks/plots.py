"""Draw docs/plots/*.svg from the committed results (`pip install '.[plots]'`).

    python -m benchmarks.plots [--output-folder docs/plots]

The same results give the same bytes with the same matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.plot_data import PLOTS, Panel, Plot, shown

DEFAULT_FOLDER = Path(__file__).parents[1] / "docs" / "plots"
PANEL_INCHES = (4.8, 3.2)
MAX_IN_ROW = 3
"""More panels stand in two rows."""
# Okabe and Ito 2008: told apart also by colour-blind readers.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D")
STYLE = {
    "svg.hashsalt": "quire",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
}


def draw(plot: Plot) -> Figure:
    width, height = PANEL_INCHES
    rows = 1 if len(plot.panels) <= MAX_IN_ROW else 2
    columns = -(-len(plot.panels) // rows)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(grid, plot.panels, strict=True):
        if isinstance(panel.series[0].x[0], str):
            draw_bars(axes, panel)
        else:
            draw_lines(axes, panel)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        if panel.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.set_ylim(0, panel.y_limit)
        if len(panel.series) > 1:
            axes.legend(frameon=False, fontsize=8)
    return figure


def draw_lines(axes: Axes, panel: Panel) -> None:
    for series, color, marker in zip(panel.series, COLORS, MARKERS, strict=False):
        axes.plot(series.x, series.y, label=series.label, color=color, marker=marker, markersize=4)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(panel.series[0].x)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())


def draw_bars(axes: Axes, panel: Panel) -> None:
    names, count = panel.series[0].x, len(panel.series)
    width = 0.8 / count
    for i, (series, color) in enumerate(zip(panel.series, COLORS, strict=False)):
        places = [place + (i - (count - 1) / 2) * width for place in range(len(names))]
        bars = axes.bar(places, series.y, width * 0.94, label=series.label, color=color)
        axes.bar_label(bars, fmt=shown, fontsize=6.5, padding=1)
    axes.set_xticks(range(len(names)), names, fontsize=7 if max(map(len, names)) > 3 else 9)
    axes.grid(visible=False, axis="x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-folder", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args().output_folder
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, read in PLOTS.items():
            draw(read()).savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
