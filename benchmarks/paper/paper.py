"""The figures of the papers, by simulation: an SVG and a JSON file each, and a table of headlines.

    python -m benchmarks.paper.paper FOLDER [--figures 2 18b] [--scale 0.01] [--jobs 2]

`make paper` makes all. `python -m benchmarks.paper.systems` serves one trace by one system.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import positive_number
from benchmarks.paper.figures import (
    FIGURES,
    check_folder,
    make_figures,
    write_figure,
    write_table,
)

from quire.base.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.paper", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the files")
    parser.add_argument(
        "--figures", nargs="+", default=list(FIGURES), metavar="NAME", help="some: 2 12 18b …"
    )
    parser.add_argument(
        "--scale", type=_share, default=1.0, metavar="SHARE", help="share of traces' lengths (1)"
    )
    parser.add_argument(
        "--jobs", type=positive_number, default=2, metavar="COUNT", help="runs side by side (2)"
    )
    options = parser.parse_args(arguments)
    try:
        check_folder(options.folder, options.figures)
        for figure in make_figures(options.figures, jobs=options.jobs, scale=options.scale):
            write_figure(figure, options.folder, options.scale)
        print(write_table(options.folder, options.scale), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
