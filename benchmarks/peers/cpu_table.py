"""Prefill and decode rates of CPU engines over precisions and batch sizes, by turns, beside what
the machine can do.

    python -m benchmarks.peers.cpu_table [--engine quire openvino llama_cpp vllm]
        [--weights int8 INT8]
        [--python openvino=PATH]… [--output-folder DIR]
    python -m benchmarks.peers.cpu_table --show FILE…

Engines whose weights have equally many bits are open at once, each in a process of its own and, if
`--python` names an interpreter, in its own environment, which needs numpy beside the engine. They
take turns (engine_turns.py): limit, A, limit, B, limit, next column. An engine that is not
installed is skipped with one line. All are measured alike, with prompts of 64 random token ids,
the same for all and fresh in every turn, greedy outputs of an exact length, and as many threads as
there are cores.

- *prefill*: 16 prompts queued at once, one output token each; prompt tokens divided by the time
  until every request has its token.
- *decode B*: B requests queued at once. The clock runs from the moment when every request has its
  first token until the first of them ends, so that B sequences decode all the time; all tokens that
  came in that time are divided by it.

Limits are by torch (quire.entrypoints.bench.machine.LimitProbe): reads of 1 GB, and 2048³ products.
A share is the figure's demand over the mean of the limits right before and right after its turn:
bytes that a step has to read, all weights as their format keeps them (engines/__init__.py: with the
scales and zero points of groups, and a head of more bits), and the keys and values of every
sequence (their scales not counted), and two operations per weight and token (attention not counted;
in prefill, the head for one token per prompt), against the fastest product that the precision
allows. The larger of the two is the share of the combined limit, since a step takes at least
max(bytes / read, operations / product). Records without `group_bits` are of before scales were
counted: every weight had `bits`.

`--isa` holds quire, OpenVINO and torch, and so the limits, to an instruction set, as on a processor
that has no more.

The last column has the quality of each engine's weights, if results/peer_quality.json is there
(quality/peer_quality.py). A ratio says little where the first engine's is worse.

A ratio is that of two engines in the same turn. *idle* is processor time that an engine took while
others had their turns, in percent of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.arguments import positive_number
from benchmarks.peers.engine_runs import (
    BENCHMARKS,
    Group,
    add_engine_arguments,
    hold_to_isa,
    opened_groups,
    record_of,
)
from benchmarks.peers.engine_tables import COLUMNS, column_start, render_tables
from benchmarks.peers.engine_turns import MachineLimits, Turn, run_turns, warm_up
from benchmarks.peers.engines import Format
from benchmarks.peers.engines.process import EngineEndedError
from benchmarks.peers.engines.random_checkpoint import (
    count_kv_elements,
    count_read_weights,
    count_weights,
    read_config,
)

from quire.entrypoints.bench.lengths import Workload
from quire.entrypoints.bench.machine import LimitProbe
from quire.entrypoints.bench.record import BenchRecord

QUALITY = BENCHMARKS / "results" / "peer_quality.json"
PROMPT_LEN = 64
PREFILL_PROMPTS = 16
WARMUP_OUTPUT_LEN = 3
PARTS = {"workload": ("engine", "weights", "bits"), "figures": ()}
"""Parts of a record, with the keys that tables need."""


def main() -> int:
    options = parse_arguments()
    if options.show:
        print(render_tables(options.show, measured_quality()))
        return 0
    records: list[dict[str, Any]] = []
    hold_to_isa(options.isa)
    probe = LimitProbe(options.threads)
    try:
        with TemporaryDirectory() as scratch:
            for group in opened_groups(
                options,
                options.work_dir or Path(scratch),
                max_num_seqs=max(batch_size(column) for column in options.columns),
                max_model_len=PROMPT_LEN + options.output_len,
            ):
                found = measure(group, options, probe)
                for run, record in zip(group.runs, found, strict=True):
                    name = f"{run.name}_{run.weights}{_suffix(options.columns)}.json"
                    if options.output_folder:
                        record.save(options.output_folder / name)
                records += map(asdict, found)
                shown = [asdict(record) for record in found]
                print(render_tables(shown, measured_quality()), flush=True)
    except EngineEndedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if records else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument(
        "--output-len", type=positive_number, default=32, help="tokens of a decode request"
    )
    parser.add_argument(
        "--show", nargs="+", type=saved_record, metavar="FILE", help="print the table of these"
    )
    return parser.parse_args()


def measured_quality() -> dict[str, float]:
    """Return KL by engine and weights, as quality/peer_quality.py wrote it; empty without its
    file."""
    if not QUALITY.exists():
        return {}
    figures = json.loads(QUALITY.read_text(encoding="utf-8"))["figures"]
    end = ": KL"
    return {
        name.removesuffix(end): figure["median"]
        for name, figure in figures.items()
        if name.endswith(end)
    }


def saved_record(path: str) -> dict[str, Any]:
    """Return what an earlier run of this benchmark has written to a file."""
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from error
    benchmark = record.get("benchmark") if isinstance(record, dict) else None
    if benchmark != "cpu_table":
        raise argparse.ArgumentTypeError(f"{path} is not of cpu_table.py but of {benchmark}")
    if missing := [name for name, parts in PARTS.items() if not holds(record.get(name), parts)]:
        raise argparse.ArgumentTypeError(f"{path} is no whole record: no {' and '.join(missing)}")
    return record


def holds(part: object, names: Sequence[str]) -> bool:
    return isinstance(part, dict) and bool(part) and all(name in part for name in names)


def batch_size(column: str) -> int:
    return PREFILL_PROMPTS if column == "prefill" else int(column)


def measure(
    group: Group, options: argparse.Namespace, probe: LimitProbe
) -> tuple[BenchRecord, ...]:
    """All columns of all engines by turns, after a short run of each that does not count."""
    config = read_config(options.model)
    limits = MachineLimits(probe, group.bits)
    warm_up(
        group.runs,
        [workload(column, WARMUP_OUTPUT_LEN) for column in options.columns],
        config["vocab_size"],
    )
    turns = run_turns(
        group.runs,
        {column: workload(column, options.output_len) for column in options.columns},
        limits,
        repeats=options.repeats,
        vocab_size=config["vocab_size"],
        seed=options.seed,
    )
    about = {
        "model": options.model.name,
        "threads": options.threads,
        "isa": options.isa,
        "prompt_len": PROMPT_LEN,
        "prefill_prompts": PREFILL_PROMPTS,
        "output_len": options.output_len,
    }
    records: list[BenchRecord] = []
    for run in group.runs:
        figures: dict[str, Sequence[float]] = {}
        for column in options.columns:
            own = turns[run, column]
            num_bytes = bytes_per_token(column, config, run.form, options.output_len)
            figures |= column_figures(column, own, count_weights(config), num_bytes)
        own = [turn for column in options.columns for turn in turns[run, column]]
        figures |= limits.figures(own)
        summary = limits.summary(own)
        records.append(record_of("cpu_table", group, run, summary, options.seed, about, figures))
    return tuple(records)


def workload(column: str, output_len: int) -> Workload:
    size = batch_size(column)
    outputs = 1 if column == "prefill" else output_len
    return Workload((PROMPT_LEN,) * size, (outputs,) * size)


def bytes_per_token(
    column: str, config: dict[str, Any], form: Format, output_len: int
) -> float | None:
    """Return what a decode step reads per token that it gives; None for prefill, where weights
    serve too many tokens to matter. The clock starts at a sequence's first output token, so that
    the sequence reads PROMPT_LEN + 1 to PROMPT_LEN + output_len - 1 tokens of its cache."""
    if column == "prefill":
        return None
    cache = (PROMPT_LEN + output_len / 2) * count_kv_elements(config) * form.kv_bits / 8
    weights = count_read_weights(config, int(column))
    return form.weight_bytes(*weights) / int(column) + cache


def column_figures(
    column: str, turns: Sequence[Turn], weights: tuple[int, int], num_bytes: float | None
) -> dict[str, list[float]]:
    """Return rates, shares and limits of one column, by turn. weights: numbers of weights in the
    layers and in the head. num_bytes: bytes read per token, None if that is no limit."""
    layers, head = weights
    timelines = [turn.timeline for turn in turns]
    if column == "prefill":
        rates = [timeline.prefill_rate() for timeline in timelines]
        operations = 2 * (layers + head / PROMPT_LEN)
    else:
        rates = [timeline.decode_rate() for timeline in timelines]
        operations = 2 * (layers + head)
    pairs = list(zip(rates, turns, strict=True))
    found = {
        "tokens_per_s": rates,
        "share_of_arithmetic": [rate * operations / turn.arithmetic for rate, turn in pairs],
        "idle_cpu_share": [turn.run.idle_cpu_seconds / turn.run.idle_seconds for turn in turns],
        "read_before_gb_per_s": [turn.before.read / 1e9 for turn in turns],
        "read_after_gb_per_s": [turn.after.read / 1e9 for turn in turns],
        "product_before_gop_per_s": [turn.before.arithmetic / 1e9 for turn in turns],
        "product_after_gop_per_s": [turn.after.arithmetic / 1e9 for turn in turns],
    }
    if num_bytes is not None:
        found["share_of_read"] = [rate * num_bytes / turn.read for rate, turn in pairs]
        outside = [timeline.share_outside_kernels() for timeline in timelines]
        if None not in outside:
            found["share_outside_kernels"] = [share for share in outside if share is not None]
    start = column_start(column)
    return {f"{start}_{name}": values for name, values in found.items()}


def _suffix(columns: Sequence[str]) -> str:
    return "" if tuple(columns) == COLUMNS else "_" + "_".join(columns)


if __name__ == "__main__":
    sys.exit(main())
