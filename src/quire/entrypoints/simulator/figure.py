"""A figure of curves or bars, which `quire.entrypoints.simulator.svg` draws."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Figure", "Panel", "Series"]


@dataclass(frozen=True, slots=True)
class Series:
    """y over x, or over the names in x if the panel has bars."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """y_limit: end of the axis, None at the largest value."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    has_bars: bool = False
    log_x: bool = False
    y_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """key: name on the command line and of its files."""

    key: str
    title: str
    panels: tuple[Panel, ...]
