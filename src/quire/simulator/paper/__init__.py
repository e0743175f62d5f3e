"""The evaluations of the PagedAttention paper and of its author's thesis, by simulation."""

from quire.simulator.paper.figure import Figure, Finding, Panel, Series
from quire.simulator.paper.paper import (
    FIGURES,
    check_folder,
    make_figures,
    write_figure,
    write_table,
)

__all__ = [
    "FIGURES",
    "Figure",
    "Finding",
    "Panel",
    "Series",
    "check_folder",
    "make_figures",
    "write_figure",
    "write_table",
]
