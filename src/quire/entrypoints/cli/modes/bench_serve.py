"""Flags and output of `quire bench serve`; their names are those of `vllm bench serve`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.entrypoints.cli.flags.bench import (
    add_length_flags,
    add_record_flags,
    bench_command,
    count,
    count_or_zero,
    given_lengths,
)
from quire.entrypoints.cli.parser import CommandParser, print_note

if TYPE_CHECKING:
    from quire.entrypoints.bench.serving import ServingOptions
    from quire.entrypoints.client import RemoteServer

__all__ = ["add_arguments", "run"]

DEFAULT_URL = "http://127.0.0.1:8000"
_PATHS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def add_arguments(parser: CommandParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", "--base-url", help=f"address of the server ({DEFAULT_URL})")
    server.add_argument("--host", help="the same in two parts")
    server.add_argument("--port", type=int, help="the same in two parts")
    server.add_argument("--api-key", help="key of the server; better in QUIRE_API_KEY")
    server.add_argument("--model", help="name that requests give (the server's first model)")
    server.add_argument(
        "--backend", choices=tuple(_PATHS), default="openai", help="completions or chats (openai)"
    )
    server.add_argument("--endpoint", choices=tuple(set(_PATHS.values())), help="the same, as path")
    server.add_argument("--extra-body", metavar="JSON", help="further fields of each request")
    _add_load_flags(parser)
    table = parser.add_argument_group("table")
    text = "latencies to show, of ttft, tpot, itl, e2el (ttft,tpot,itl)"
    table.add_argument("--percentile-metrics", default="ttft,tpot,itl", help=text)
    table.add_argument(
        "--metric-percentiles", default="99", help="percentiles to show, such as 50,95,99 (99)"
    )
    text = "count requests that keep these limits in milliseconds, such as ttft:100 tpot:20"
    table.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help=text)
    table.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    add_record_flags(parser, draws_seed=True)


def _add_load_flags(parser: CommandParser) -> None:
    load = parser.add_argument_group("load")
    add_length_flags(parser)
    load.add_argument("--num-prompts", type=count, default=64, help="requests (64)")
    load.add_argument(
        "--request-rate", type=float, default=float("inf"), help="requests per second (inf)"
    )
    text = "1: Poisson arrivals; below: in bursts; above: more even (1)"
    load.add_argument("--burstiness", type=float, default=1.0, help=text)
    load.add_argument("--max-concurrency", type=count, help="requests under way at once")
    load.add_argument(
        "--temperature", type=float, default=0.0, help="temperature of every request (0)"
    )
    load.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers are exactly as long as drawn",
    )  # fmt: skip
    text = "prompts are any token ids below it (ids of plain text, by the server's tokenizer)"
    load.add_argument("--vocab-size", type=count, help=text)
    text = "first requests that do not count (1)"
    load.add_argument("--num-warmups", type=count_or_zero, default=1, help=text)
    load.add_argument("--repeats", type=count, default=1, help="runs of the workload (1)")
    text = "seconds after which a request has failed (600)"
    load.add_argument("--request-timeout", type=float, default=600.0, help=text)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, and save the record if asked. Status 1 if a request failed."""
    from quire.entrypoints.bench.serving import run_serving
    from quire.entrypoints.bench.serving_figures import LATENCIES
    from quire.entrypoints.bench.serving_table import render_serving
    from quire.entrypoints.client import RemoteServer, ServerAddress

    names = _names(options.percentile_metrics, tuple(LATENCIES))
    percentiles = _percentiles(options.metric_percentiles)
    is_drawn = options.bench_seed is None
    if is_drawn:  # the server may have cached the prompts of the last run
        options.bench_seed = secrets.randbelow(2**31)
    wanted = _read_options(options)
    server = RemoteServer(ServerAddress.parse(_url(options)), options.api_key)
    found = run_serving(wanted, server)
    rate, concurrency = wanted.arrivals.rate, wanted.max_concurrency
    print(render_serving(found.figures, names, percentiles, rate, concurrency))
    if is_drawn:
        print_note(f"prompts were drawn anew; --bench-seed {options.bench_seed} repeats them")
    share = max(figures.generator_cpu_share for figures in found.figures)
    if share > _BUSY:
        print_note(f"the load generator took {share:.0%} of a processor: it may be the limit")
    errors = [error for figures in found.figures for error in figures.errors]
    if errors:
        print_note(f"{len(errors)} requests failed; the first: {errors[0]}")
    if options.output_json is not None:
        _save(found, wanted, server, options, percentiles)
    return 1 if errors else 0


_BUSY = 0.8
"""Share of one processor from which on the generator may wait for itself."""


def _save(
    found: Any,
    wanted: ServingOptions,
    server: RemoteServer,
    options: argparse.Namespace,
    percentiles: list[float],
) -> None:
    from quire.entrypoints.bench.serving_record import serving_record

    limits = not options.no_limits
    record = serving_record(found, wanted, server, bench_command(), percentiles, with_limits=limits)
    record.save(options.output_json)


def _read_options(options: argparse.Namespace) -> ServingOptions:
    from quire.entrypoints.bench.serving import ServingOptions
    from quire.entrypoints.bench.serving_figures import parse_goodput
    from quire.entrypoints.bench.serving_load import Arrivals

    prompts, outputs = given_lengths(options)
    return ServingOptions(
        path=options.endpoint or _PATHS[options.backend],
        model=options.model,
        prompts=prompts,
        outputs=outputs,
        max_output_len=options.max_output_len,
        num_prompts=options.num_prompts,
        arrivals=Arrivals(options.request_rate, options.burstiness),
        max_concurrency=options.max_concurrency,
        vocab_size=options.vocab_size,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=_extra_body(options.extra_body),
        goals_ms=parse_goodput(options.goodput),
        num_warmups=options.num_warmups,
        repeats=options.repeats,
        timeout_s=options.request_timeout,
        seed=options.bench_seed,
        show_progress=sys.stderr.isatty() and not options.disable_tqdm,
    )


def _url(options: argparse.Namespace) -> str:
    """The address that the flags name, in one part or in two."""
    if options.url is not None:
        return options.url
    if options.host is None and options.port is None:
        return DEFAULT_URL
    return f"http://{options.host or '127.0.0.1'}:{options.port or 8000}"


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        found = {} if text is None else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body is {text!r}. Give a JSON object, such as '{{\"n\": 2}}'.")
    return found


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--percentile-metrics has {name!r}. Give some of: {', '.join(known)}."
            )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= percent <= 100 for percent in found):
        raise ConfigError(f"--metric-percentiles is {text!r}. Give numbers such as 50,95,99.")
    return found
