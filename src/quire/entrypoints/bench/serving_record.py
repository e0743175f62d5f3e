"""The record of `quire bench serve`. Apart, since a record loads torch for the machine's facts,
which must not happen while a server is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from quire.base.platform import detect_platform
from quire.entrypoints.bench.lengths import describe_lengths
from quire.entrypoints.bench.machine import measure_limits
from quire.entrypoints.bench.record import BenchRecord, new_record, spread_of
from quire.entrypoints.bench.serving import ServingOptions, ServingRun
from quire.entrypoints.bench.serving_table import figure_values
from quire.entrypoints.client import RemoteServer

__all__ = ["serving_record"]

_KEPT = (
    "path", "max_output_len", "num_prompts", "max_concurrency", "vocab_size", "ignore_eos",
    "temperature", "extra_body", "goals_ms", "num_warmups",
)  # fmt: skip


def serving_record(
    run: ServingRun,
    options: ServingOptions,
    server: RemoteServer,
    command: Sequence[str],
    percentiles: Sequence[float],
    *,
    with_limits: bool,
) -> BenchRecord:
    """limits: limits of this machine, so only for a server that runs on it."""
    names = list(run.figures[0].latencies_ms)
    limits = None
    if with_limits and server.address.is_local:
        limits = measure_limits(detect_platform().cpu.num_cores)
    return new_record(
        "serve",
        command,
        None,
        limits,
        seed=options.seed,
        workload={
            "server": str(server.address),
            "model": run.model,
            "request_rate": str(options.arrivals.rate),
            "burstiness": options.arrivals.burstiness,
            "prompts": describe_lengths(options.prompts),
            "outputs": describe_lengths(options.outputs),
            **{name: asdict(options)[name] for name in _KEPT},
            "num_prompt_tokens": run.workload.num_prompt_tokens,
            "num_output_tokens": run.workload.num_output_tokens,
            "num_failed": sum(len(figures.errors) for figures in run.figures),
            "errors": sorted({error for figures in run.figures for error in figures.errors})[:10],
        },
        figures={
            name: spread_of(values)
            for name, values in figure_values(run.figures, names, percentiles).items()
        },
    )
