"""Decode of a model with latent attention behind a long context, beside the limits of the machine.

    python -m benchmarks.steps.latent_cpu [--context 4096] [--output FILE]

One engine with random weights decodes 1, 4 and 16 rows, each behind a prompt of its own. A figure
is the wall time of a step of all rows, planning and drawing included, and a share: the time in
which this machine reads all bytes of the step once, or does all its operations, whichever is
longer (`quire.entrypoints.bench.machine.LimitProbe`, measured in turns with the steps), over that
wall time.
The bytes are those of latent planes and of weights: all but an embedding that is not tied and
experts that no row chooses. A second engine, which captures nothing, computes the same steps and
counts the latter in each.
"""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any
from unittest.mock import patch

from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record
import torch

from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.machine import LimitProbe
from quire.config.model_spec import ModelSpec
from quire.compute.layers.moe import Experts

ROWS = (1, 4, 16)
WARMUP_STEPS = 2
CHUNK = 512


def step_limits(
    spec: ModelSpec, num_rows: int, context: int, num_experts: int
) -> tuple[float, float]:
    """Bytes that a step reads, and its operations, two for each multiply and add. num_experts:
    experts that the rows choose, in all layers together."""
    latent, counts = spec.latent, spec.parameters
    if latent is None:
        raise SystemExit("the model has no latent attention; choose another --model")
    matrices = spec.num_parameters - (0 if spec.tie_word_embeddings else counts.embedding)
    read = matrices
    if spec.experts is not None:
        routing = spec.experts.routing
        unread = routing.num_experts * spec.experts.num_layers - num_experts
        read -= 3 * spec.hidden_size * spec.experts.inner_size * unread
    plane = latent.rank + latent.rotary
    pair = 2 * spec.num_heads * (plane + latent.rank)
    num_bytes = 2 * (read + num_rows * context * spec.num_layers * plane)
    operations = 2 * (matrices - counts.idle) + spec.num_layers * context * pair
    return num_bytes, num_rows * operations


def step_times(engine: LocalEngine, num_steps: int, num_rows: int) -> list[float]:
    """Milliseconds of each step; each computes a token of all rows."""
    times: list[float] = []
    for _ in range(num_steps):
        started = time.perf_counter()
        output = engine.client.step()
        times.append(1000 * (time.perf_counter() - started))
        if len(output.handles) != num_rows:
            raise SystemExit(f"A step computed {len(output.handles)} rows instead of {num_rows}.")
    return times


def open_engine(options: argparse.Namespace, **settings: Any) -> LocalEngine:
    most = max(options.rows)
    length = options.context + output_len(options, most)
    return LocalEngine(
        options,
        max_num_seqs=most,
        max_num_batched_tokens=CHUNK,
        max_model_len=length,
        depth=1,
        num_kv_blocks=most * (2 + length // 16),
        hf_overrides={"max_position_embeddings": 2 * options.context},
        **settings,
    )


def output_len(options: argparse.Namespace, num_rows: int) -> int:
    """Tokens that the first row computes: it decodes while the prompts of the others are computed,
    whose chunks leave room for all rows, and then in the steps that are measured."""
    others = num_rows * (1 + options.context // (CHUNK - num_rows))
    return others + WARMUP_STEPS + options.steps * options.turns


def begin_decode(engine: LocalEngine, options: argparse.Namespace, num_rows: int) -> None:
    """Compute the prompts, so that all rows decode in the steps that follow."""
    vocab_size = engine.resolved.spec.vocab_size
    prompts = random_prompts([options.context] * num_rows, vocab_size, options.seed)
    engine.add(prompts, output_len(options, num_rows))
    while len(engine.client.step().handles) < num_rows:
        pass


def distinct_experts(engine: LocalEngine, options: argparse.Namespace, num_rows: int) -> list[int]:
    """Mean number of experts that a step of each turn uses, in all layers together."""
    begin_decode(engine, options, num_rows)
    step_times(engine, WARMUP_STEPS, num_rows)
    count = 0
    compute = Experts.__call__

    def counted(self: Experts, x: torch.Tensor, ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        nonlocal count
        count += ids.unique().numel()
        return compute(self, x, ids, *rest, **named)

    means: list[int] = []
    with patch.object(Experts, "__call__", counted):
        for _ in range(options.turns):
            count = 0
            step_times(engine, options.steps, num_rows)
            means.append(round(count / options.steps))
    engine.end()
    return means


def main() -> int:
    options = parse_arguments()
    engine = open_engine(options)
    spec, probe = engine.resolved.spec, LimitProbe(options.threads)
    figures: dict[str, list[float]] = {}
    for num_rows in options.rows:
        begin_decode(engine, options, num_rows)
        step_times(engine, WARMUP_STEPS, num_rows)
        turns = [
            (
                probe.read(),
                probe.product("bf16"),
                statistics.median(step_times(engine, options.steps, num_rows)),
            )
            for _ in range(options.turns)
        ]
        engine.end()
        for place, name in enumerate(("read_gb_s", "product_gop_s", "step_ms")):
            figures[f"{num_rows}_rows_{name}"] = [turn[place] for turn in turns]
    counting = open_engine(options, enforce_eager=True)
    for num_rows in options.rows:
        counts = distinct_experts(counting, options, num_rows)
        rates, products, times = (
            figures[f"{num_rows}_rows_{name}"] for name in ("read_gb_s", "product_gop_s", "step_ms")
        )
        least: list[float] = []
        for num_experts, rate, product in zip(counts, rates, products, strict=True):
            num_bytes, operations = step_limits(spec, num_rows, options.context, num_experts)
            least.append(max(num_bytes / rate, operations / product) / 1e6)
        shares = [limit / step for limit, step in zip(least, times, strict=True)]
        figures[f"{num_rows}_rows_experts_read"] = [float(count) for count in counts]
        figures[f"{num_rows}_rows_limit_ms"] = least
        figures[f"{num_rows}_rows_share_of_limit"] = shares
        step_ms, share = statistics.median(times), statistics.median(shares)
        experts = statistics.median(counts)
        print(f"{num_rows:3} rows: {step_ms:.2f} ms, {experts} experts, {share:.0%} of the limit")
    workload = {"context": options.context, "steps_per_turn": options.steps}
    save_local_record("latent_cpu", options, engine, workload, figures)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=5, help="per turn")
    parser.add_argument("--context", type=int, default=4096, help="tokens before each row")
    add_local_arguments(parser, turns_help="of each number of rows")
    parser.set_defaults(
        model=parser.get_default("model").with_name("deepseek-v2-lite-4-layers"),
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
