"""Prefill and decode rates of CPU engines over precisions and batch sizes, beside what the machine
can do.

    python benchmarks/cpu_table.py [--engine quire openvino llama_cpp vllm] [--output-folder DIR]
    python benchmarks/cpu_table.py --show FILE…

Every engine is measured alike, with prompts of 64 random token ids, greedy outputs of an exact
length, and as many threads as there are cores. An engine that is not installed is skipped with one
line, so each may live in an environment of its own, which needs this folder's imports only: torch,
numpy and `src` on PYTHONPATH.

- *prefill*: 16 prompts queued at once, one output token each; prompt tokens divided by the time
  until every request has its token.
- *decode B*: B requests queued at once. The clock runs from the moment when every request has its
  first token until the first of them ends, so that B sequences decode all the time; all tokens that
  came in that time are divided by it.

Each repeat has fresh token ids and measures the machine's limits first: a read of 1 GB, and 2048³
products in float32, bfloat16 and int8, by torch. A share is the figure's demand over the limit of
the same repeat: bytes of the weights (scales and KV cache not counted) read once per step, and two
operations per weight and token (attention not counted; in prefill, the head for one token per
prompt), against the fastest product that the precision allows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_runs import LimitTurns, Run, add_engine_arguments, opened_engines, record_of
from engines import ENGINES, Timeline, run_requests
from engines.random_checkpoint import count_weights, read_config

from quire.bench.lengths import random_prompts
from quire.bench.record import BenchRecord, spread_of

PROMPT_LEN = 64
PREFILL_PROMPTS = 16
COLUMNS = ("prefill", "1", "4", "16", "32")
WARMUP_OUTPUT_LEN = 3


def main() -> int:
    options = parse_arguments()
    if options.show:
        print(render_table([json.loads(path.read_text()) for path in options.show]))
        return 0
    records: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        for run in opened_engines(
            options,
            options.work_dir or Path(scratch),
            max_num_seqs=max(batch_size(column) for column in options.columns),
            max_model_len=PROMPT_LEN + options.output_len,
        ):
            record = measure(run, options)
            name = f"{run.name}_{run.weights}{_suffix(options.columns)}.json"
            if options.output_folder:
                record.save(options.output_folder / name)
            records.append(asdict(record))
            print(render_table(records[-1:]), flush=True)
    if len(records) > 1:
        print(render_table(records))
    return 0 if records else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a decode request")
    parser.add_argument("--show", nargs="+", type=Path, help="print the table of these files")
    return parser.parse_args()


def batch_size(column: str) -> int:
    return PREFILL_PROMPTS if column == "prefill" else int(column)


def measure(run: Run, options: argparse.Namespace) -> BenchRecord:
    """All columns by turns, after a short run of each that does not count."""
    config = read_config(options.model)
    vocab_size = config["vocab_size"]
    limits = LimitTurns(options.threads)
    timelines: dict[str, list[Timeline]] = {column: [] for column in options.columns}
    seeds = count(options.seed)  # no prompt twice: an engine might know the second
    for column in options.columns:
        run_column(run, column, WARMUP_OUTPUT_LEN, vocab_size, next(seeds))
    for _ in range(options.repeats):
        limits.measure()
        for column in options.columns:
            timeline = run_column(run, column, options.output_len, vocab_size, next(seeds))
            timelines[column].append(timeline)
    figures: dict[str, Sequence[float]] = {}
    for column, turns in timelines.items():
        figures |= column_figures(column, turns, limits, run.bits, count_weights(config))
    workload = {
        "model": options.model.name,
        "threads": options.threads,
        "prompt_len": PROMPT_LEN,
        "prefill_prompts": PREFILL_PROMPTS,
        "output_len": options.output_len,
    }
    return record_of("cpu_table", run, limits, options.seed, workload, figures)


def run_column(run: Run, column: str, output_len: int, vocab_size: int, seed: int) -> Timeline:
    size = batch_size(column)
    prompts = random_prompts([PROMPT_LEN] * size, vocab_size, seed)
    lengths = [1 if column == "prefill" else output_len] * size
    return run_requests(run.engine, prompts, lengths)


def column_figures(
    column: str,
    turns: Sequence[Timeline],
    limits: LimitTurns,
    bits: int,
    weights: tuple[int, int],
) -> dict[str, list[float]]:
    """Rates and shares of one column, by turn. weights: of the layers, and of the head."""
    layers, head = weights
    if column == "prefill":
        rates = [turn.prefill_rate() for turn in turns]
        operations = 2 * (layers + head / PROMPT_LEN)
        return {
            "prefill_tokens_per_s": rates,
            "prefill_share_of_arithmetic": _shares(rates, operations, limits.arithmetic(bits)),
        }
    rates = [turn.decode_rate() for turn in turns]
    num_bytes = (layers + head) * bits / 8 / int(column)
    found = {
        "tokens_per_s": rates,
        "share_of_read": _shares(rates, num_bytes, limits.reads()),
        "share_of_arithmetic": _shares(rates, 2 * (layers + head), limits.arithmetic(bits)),
    }
    outside = [turn.share_outside_kernels() for turn in turns]
    if None not in outside:
        found["share_outside_kernels"] = [share for share in outside if share is not None]
    return {f"decode_{column}_{name}": values for name, values in found.items()}


def _shares(rates: Sequence[float], per_token: float, limits: Sequence[float]) -> list[float]:
    return [rate * per_token / limit for rate, limit in zip(rates, limits, strict=True)]


def render_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown. Median tokens per second (range), and the larger share: r of read, a of
    arithmetic. Files of one engine and format share a row: those that hold some columns each, and
    the turns of one column, whose repeats are put together."""
    together = pooled(records)
    titles = ("prefill", *(f"decode B={column}" for column in COLUMNS[1:]), "limits")
    lines = [f"| engine, weights | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for (engine, weights), figures in together.items():
        cells = [*(_cell(column, figures) for column in COLUMNS), _limits_cell(figures)]
        lines.append(f"| {ENGINES[engine].title}, {weights} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_outside_lines(together)])


def pooled(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
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


def _cell(column: str, figures: dict[str, Any]) -> str:
    start = "prefill" if column == "prefill" else f"decode_{column}"
    rate = figures.get(f"{start}_tokens_per_s")
    if rate is None:
        return ""
    shares = [
        (figures[name]["median"], letter)
        for letter, name in (("r", f"{start}_share_of_read"), ("a", f"{start}_share_of_arithmetic"))
        if name in figures
    ]
    share, letter = max(shares)
    text = f"{rate['median']:.1f} ({rate['low']:.1f}–{rate['high']:.1f})"
    return f"{text}, {share:.0%} {letter}"


def _limits_cell(figures: dict[str, Any]) -> str:
    values = (figures[f"limit_{name}"]["median"] for name in (
        "read_gb_per_s", "matmul_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s"
    ))  # fmt: skip
    return "{:.0f} GB/s; fp32 {:.0f}, bf16 {:.0f}, int8 {:.0f} GOP/s".format(*values)


def _outside_lines(together: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for (_, weights), figures in together.items():
        shares = [
            f"B={column} {figures[name]['median']:.1%}"
            for column in COLUMNS
            if (name := f"decode_{column}_share_outside_kernels") in figures
        ]
        if shares:
            found.append(f"\nOutside kernels, {weights}: {', '.join(shares)} of a decode step.")
    return found


def _suffix(columns: Sequence[str]) -> str:
    return "" if tuple(columns) == COLUMNS else "_" + "_".join(columns)


if __name__ == "__main__":
    sys.exit(main())
