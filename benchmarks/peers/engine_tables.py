"""Tables of the records of engines: rates with their shares of the machine's limits, and the ratios
of engines that took turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from types import MappingProxyType
from typing import Any

from benchmarks.peers.engine_runs import title_of

from quire.entrypoints.bench.record import Spread, spread_of

__all__ = ["COLUMNS", "column_start", "ratios_by_turn", "render_tables"]

COLUMNS = ("prefill", "1", "4", "16", "32")
TITLES = ("prefill", *(f"decode B={column}" for column in COLUMNS[1:]))
LEGEND = (
    "Median tokens per second (range), and the share of the combined limit, "
    "max(bytes / read, operations / product): r if the read binds, a if arithmetic does; "
    "the share of the other limit in brackets where it is at least half as large. Shares are "
    "medians over the turns whose limits before and after differ by at most 15 %, "
    "if these are half of them or more."
)
QUALITY_LEGEND = (
    "KL: loss of quality by the weights and activations of SmolLM2 in this format, from its "
    "checkpoint, in nats per token (quality/peer_quality.py); that of a KV cache is not counted."
)
OTHER_SHARE_FROM = 0.5
STEADY_WITHIN = 0.15
"""Largest difference, as a share of the larger one. In a virtual machine the speed of memory may
jump by more than half: a speed between two such limits is neither's."""

NOT_MEASURED: Mapping[str, float] = MappingProxyType({})

Figures = dict[str, dict[str, Any]]
"""Figures by name, as in a file: median, low, high, values."""


def column_start(column: str) -> str:
    """Return the start of the names of a column's figures."""
    return "prefill" if column == "prefill" else f"decode_{column}"


def render_tables(
    records: Sequence[dict[str, Any]], quality: Mapping[str, float] = NOT_MEASURED
) -> str:
    """Markdown: rates, ratios by turn, and what was spent outside kernels and while idle. Files of
    one engine and format share a row: files with some columns each, and the turns of one column,
    whose repeats are put together. quality: KL by `title_of` an engine and its weights."""
    together = pooled(records)
    lines = [LEGEND, *([QUALITY_LEGEND] if quality else []), ""]
    lines += _head("engine, weights", (*TITLES, "limits", *(["KL"] if quality else [])))
    for (engine, weights), figures in together.items():
        cells = [*(_cell(column, figures) for column in COLUMNS), _limits_cell(figures)]
        if quality:
            divergence = quality.get(title_of(engine, weights.removesuffix("_kv8")))
            cells.append("" if divergence is None else f"{divergence:.4f}")
        lines.append(f"| {title_of(engine, weights)} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_ratio_lines(records), *_note_lines(together)])


def pooled(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Figures]:
    """Figures by engine and format, over the repeats of all records of these."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        work = record["workload"]
        of_engine = values.setdefault((work["engine"], work["weights"]), {})
        for name, figure in record["figures"].items():
            of_engine.setdefault(name, []).extend(figure["values"])
    return {
        who: {name: asdict(spread_of(turns)) for name, turns in figures.items()}
        for who, figures in values.items()
    }


def ratios_by_turn(records: Sequence[dict[str, Any]], figure: str) -> dict[str, Spread]:
    """Each engine of a group over every one after it, turn by turn, by "A / B"."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        work = record["workload"]
        if "turns" in work and figure in record["figures"]:
            groups.setdefault((work["turns"]["group"], work["bits"]), []).append(record)
    found: dict[str, list[float]] = {}
    for members in groups.values():
        for first, other in combinations(sorted(members, key=_place), 2):
            pairs = zip(
                first["figures"][figure]["values"], other["figures"][figure]["values"], strict=True
            )
            name = f"{_title(first)} / {_title(other)}"
            found.setdefault(name, []).extend(mine / theirs for mine, theirs in pairs)
    return {name: spread_of(values) for name, values in found.items()}


def _place(record: dict[str, Any]) -> int:
    return record["workload"]["turns"]["members"].index(_title(record))


def _title(record: dict[str, Any]) -> str:
    return title_of(record["workload"]["engine"], record["workload"]["weights"])


def _head(first: str, titles: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]


def _cell(column: str, figures: Figures) -> str:
    start = column_start(column)
    rate = figures.get(f"{start}_tokens_per_s")
    if rate is None:
        return ""
    text = f"{rate['median']:.1f} ({rate['low']:.1f}–{rate['high']:.1f})"
    return f"{text}, {_shares(start, figures)}"


def _shares(start: str, figures: Figures) -> str:
    """The larger share of every turn that counts, their median."""
    limits = {"read": "share_of_read", "product": "share_of_arithmetic"}
    found = {limit: figures[name]["values"] for limit, share in limits.items()
             if (name := f"{start}_{share}") in figures}  # fmt: skip
    turns = list(zip(*found.values(), strict=True))
    steady = list(zip(*(_is_steady(start, limit, figures) for limit in found), strict=True))
    chosen = [turn for turn, is_steady in zip(turns, steady, strict=True) if all(is_steady)]
    if 2 * len(chosen) >= len(turns):
        turns = chosen
    medians = [statistics.median(shares) for shares in zip(*turns, strict=True)]
    if "read" not in found:
        return f"{medians[0]:.0%} a"
    combined = statistics.median(map(max, turns))
    other, binding = sorted(zip(medians, "ra", strict=True))
    text = f"{combined:.0%} {binding[1]}"
    if other[0] >= OTHER_SHARE_FROM * binding[0]:
        text += f" ({other[0]:.0%} {other[1]})"
    return text


def _is_steady(start: str, limit: str, figures: Figures) -> list[bool]:
    """Return for every turn whether this limit was nearly the same before and after it. Old records
    keep their mean alone, which counts as steady."""
    unit = "gb_per_s" if limit == "read" else "gop_per_s"
    names = [f"{start}_{limit}_{when}_{unit}" for when in ("before", "after")]
    if not all(name in figures for name in names):
        return [True] * len(figures[f"{start}_share_of_arithmetic"]["values"])
    pairs = zip(*(figures[name]["values"] for name in names), strict=True)
    return [min(pair) >= (1 - STEADY_WITHIN) * max(pair) for pair in pairs]


def _limits_cell(figures: Figures) -> str:
    values = (figures[f"limit_{name}"]["median"] for name in (
        "read_gb_per_s", "matmul_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s"
    ))  # fmt: skip
    return "{:.0f} GB/s; fp32 {:.0f}, bf16 {:.0f}, int8 {:.0f} GOP/s".format(*values)


def _ratio_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    by_column = [ratios_by_turn(records, f"{column_start(column)}_tokens_per_s")
                 for column in COLUMNS]  # fmt: skip
    names = list(dict.fromkeys(name for ratios in by_column for name in ratios))
    if not names:
        return []
    lines = ["", "Ratios of the same turns, median (range):", "", *_head("engines", TITLES)]
    for name in names:
        cells = (
            f"{ratios[name].median:.2f} ({ratios[name].low:.2f}–{ratios[name].high:.2f})"
            if name in ratios
            else ""
            for ratios in by_column
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _note_lines(together: dict[tuple[str, str], Figures]) -> list[str]:
    found: list[str] = []
    for who, figures in together.items():
        shares = {
            column: figures[name]["median"]
            for column in COLUMNS
            if (name := f"decode_{column}_share_outside_kernels") in figures
        }
        if shares:
            text = ", ".join(f"B={column} {share:.1%}" for column, share in shares.items())
            found.append(f"\nOutside kernels, {title_of(*who)}: {text} of a decode step.")
        names = [f"{column_start(column)}_idle_cpu_share" for column in COLUMNS]
        idle = [value for name in names if name in figures for value in figures[name]["values"]]
        if idle:
            found.append(
                f"\nIdle, {title_of(*who)}: {statistics.median(idle):.1%} of a core "
                f"(at most {max(idle):.1%})."
            )
    return found
