"""The table of `quire bench serve`, in the order and words that scripts know from vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from quire.entrypoints.bench.serving_figures import LATENCIES, ServingFigures

__all__ = ["WIDTH", "figure_values", "render_serving"]

WIDTH = 50
_LABEL = 40

_LABELS: Mapping[str, str] = {
    "num_prompt_tokens": "Total input tokens:",
    "num_output_tokens": "Total generated tokens:",
    "requests_per_s": "Request throughput (req/s):",
    "goodput_per_s": "Request goodput (req/s):",
    "output_tokens_per_s": "Output token throughput (tok/s):",
    "peak_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "peak_concurrency": "Peak concurrent requests:",
    "total_tokens_per_s": "Total token throughput (tok/s):",
}
_COUNTS = ("num_prompt_tokens", "num_output_tokens", "peak_concurrency")


def figure_values(
    runs: Sequence[ServingFigures], names: Sequence[str], percentiles: Sequence[float]
) -> dict[str, list[float]]:
    """Each figure by name, one value per run."""
    found: dict[str, list[float]] = {}
    for run in runs:
        plain = {name: getattr(run, name) for name in _LABELS}
        plain["duration_s"] = run.duration_s
        plain["generator_cpu_share"] = run.generator_cpu_share
        for name, value in {**plain, **run.statistics(names, percentiles)}.items():
            if value is not None:
                found.setdefault(name, []).append(float(value))
    return found


def render_serving(
    runs: Sequence[ServingFigures],
    names: Sequence[str],
    percentiles: Sequence[float],
    request_rate: float,
    max_concurrency: int | None,
) -> str:
    """Return the medians over the runs as text. names: names of the latencies to show."""
    medians = {
        name: statistics.median(values)
        for name, values in figure_values(runs, names, percentiles).items()
    }
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", sum(run.num_completed for run in runs)),
        _line("Failed requests:", sum(len(run.errors) for run in runs)),
    ]
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", request_rate))
    lines.append(_line("Benchmark duration (s):", medians["duration_s"]))
    for name, label in _LABELS.items():
        if name in medians:
            value = medians[name]
            lines.append(_line(label, int(value) if name in _COUNTS else value))
    for name in names:
        shown = [item for item in medians.items() if item[0].endswith(f"_{name}_ms")]
        if shown:
            lines.append(LATENCIES[name].center(WIDTH, "-"))
            lines += [_line(_statistic_label(key, name), value) for key, value in shown]
    return "\n".join([*lines, "=" * WIDTH])


def _line(label: str, value: float) -> str:
    return f"{label:<{_LABEL}} {value if isinstance(value, int) else format(value, '.2f'):<10}"


def _statistic_label(key: str, name: str) -> str:
    """`P99 TTFT (ms):` of `p99_ttft_ms`."""
    return f"{key.removesuffix(f'_{name}_ms').capitalize()} {name.upper()} (ms):"
