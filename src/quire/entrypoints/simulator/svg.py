"""Plots of figures as SVG, written without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape

from quire.entrypoints.simulator.figure import Figure, Panel

__all__ = ["draw_figure"]

WIDTH, HEIGHT = 330, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 26, 44
PER_ROW = 3
COLOURS = ("#0b6e4f", "#c8553d", "#28527a", "#8f5aa8", "#d9a404", "#5f6b6d")
MARGIN = 1.05
"""Room above the largest value."""

Scale = Callable[[float], float]


def draw_figure(figure: Figure) -> str:
    """Return one SVG document with all panels of a figure, in rows of three."""
    columns = min(len(figure.panels), PER_ROW)
    rows = math.ceil(len(figure.panels) / PER_ROW)
    width, height = columns * WIDTH, rows * HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(figure.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="16" font-size="13">{escape(figure.title)}</text>',
    ]
    for index, panel in enumerate(figure.panels):
        x, y = index % PER_ROW * WIDTH, index // PER_ROW * HEIGHT + 24
        parts.append(f'<g transform="translate({x} {y})">{"".join(_draw_panel(panel))}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _draw_panel(panel: Panel) -> Iterator[str]:
    top = panel.y_limit or MARGIN * max(max(each.y) for each in panel.series) or 1.0

    def y_of(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, top) / top)

    yield f'<text x="{LEFT}" y="16">{escape(panel.title)}</text>'
    yield _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#333333")
    yield _line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#333333")
    for tick in _ticks(top):
        yield _line(LEFT, y_of(tick), WIDTH - RIGHT, y_of(tick), "#e3e3e3")
        yield f'<text x="{LEFT - 4}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text x="12" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {middle:.0f})">{escape(panel.y_label)}</text>'
    )
    yield (
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(panel.x_label)}</text>"
    )
    yield from _draw_bars(panel, y_of) if panel.has_bars else _draw_lines(panel, y_of)
    for place, series in enumerate(panel.series):
        y = TOP + 6 + 13 * place
        yield f'<rect x="{LEFT + 8}" y="{y}" width="9" height="9" fill="{_colour(place)}"/>'
        yield f'<text x="{LEFT + 21}" y="{y + 9}">{escape(series.label)}</text>'


def _draw_lines(panel: Panel, y_of: Scale) -> Iterator[str]:
    values = [float(x) for each in panel.series for x in each.x]
    low, high = min(values), max(values)
    if not panel.log_x:
        low = 0.0

    def x_of(value: float) -> float:
        if panel.log_x:
            share = math.log(value / low) / math.log(high / low) if high > low else 0.5
        else:
            share = value / high if high else 0.0
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    for tick in sorted(set(values)) if panel.log_x else _ticks(high):
        yield (
            f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
            f"{tick:g}</text>"
        )
    for place, series in enumerate(panel.series):
        points = " ".join(
            f"{x_of(float(x)):.1f},{y_of(y):.1f}" for x, y in zip(series.x, series.y, strict=True)
        )
        yield (
            f'<polyline points="{points}" fill="none" stroke="{_colour(place)}" stroke-width="2"/>'
        )


def _draw_bars(panel: Panel, y_of: Scale) -> Iterator[str]:
    names = list(dict.fromkeys(str(x) for each in panel.series for x in each.x))
    group = (WIDTH - LEFT - RIGHT) / len(names)
    width = 0.8 * group / len(panel.series)
    for place, series in enumerate(panel.series):
        for name, value in zip(series.x, series.y, strict=True):
            x = LEFT + group * (names.index(str(name)) + 0.1) + width * place
            height = HEIGHT - BOTTOM - y_of(value)
            yield (
                f'<rect x="{x:.1f}" y="{y_of(value):.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{_colour(place)}"/>'
            )
    for index, name in enumerate(names):
        x = LEFT + group * (index + 0.5)
        yield (
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle" font-size="9">'
            f"{escape(name)}</text>"
        )


def _ticks(top: float) -> list[float]:
    """Return three to six round numbers from 0 to `top`."""
    raw = top / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    return [round(index * step, 10) for index in range(int(top / step) + 1)]


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>'
