"""Decode and prompts of a model with recurrent states, beside the reading of its weights.

    python -m benchmarks.steps.recurrent_cpu [--model benchmarks/models/lfm2-1.2b] [--output FILE]

One engine with random weights decodes 1, 4 and 16 rows behind short prompts, then computes prompts
of 1,024 tokens. A figure of decode is the wall time of a step of all rows, planning and drawing
included, and the share of it in which this machine reads all weights once and reads and writes the
states of all rows (`quire.entrypoints.bench.machine.LimitProbe`, measured before each number of
rows). Where the model has gated delta rules, a second engine computes the same prompts by turns,
with attention in place of all of them and about as many outputs of projections.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from benchmarks.peers.engines.random_checkpoint import read_config
from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record

from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.machine import LimitProbe

ROWS = (1, 4, 16)
SHORT_LEN = 8
WARMUP_STEPS = 3


def open_engine(options: argparse.Namespace, overrides: dict[str, Any]) -> LocalEngine:
    return LocalEngine(
        options,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=options.prompt_len,
        max_model_len=options.prompt_len + 2,
        depth=1,
        num_kv_blocks=max(options.rows) * (2 + options.prompt_len // 16),
        hf_overrides=overrides,
    )


def decode_times(
    engine: LocalEngine, options: argparse.Namespace, num_rows: int, vocab_size: int
) -> list[float]:
    """Milliseconds of each step."""
    prompts = random_prompts([SHORT_LEN] * num_rows, vocab_size, options.seed + num_rows)
    engine.end()
    engine.add(prompts, 2 + WARMUP_STEPS + options.steps)
    times: list[float] = []
    for _ in range(1 + WARMUP_STEPS + options.steps):
        started = time.perf_counter()
        engine.client.step()
        times.append(1000 * (time.perf_counter() - started))
    engine.end()
    return times[1 + WARMUP_STEPS :]


def prompt_rate(engine: LocalEngine, prompt: list[int]) -> float:
    """Tokens per second."""
    engine.add([prompt], output_len=1)
    started = time.perf_counter()
    engine.finish()
    return len(prompt) / (time.perf_counter() - started)


def of_attention(config: dict[str, Any]) -> dict[str, Any] | None:
    """Settings under which all layers attend, with as many outputs of the projections to q, k, v
    and gates as the rule's to q, k, v and z; None for a model without the rule."""
    if "linear_num_value_heads" not in config:
        return None
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    heads = round((keys + values - kv_heads * head_dim) / head_dim)
    return {
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "num_attention_heads": heads // kv_heads * kv_heads,
    }


def main() -> int:
    options = parse_arguments()
    config = read_config(options.model)
    vocab_size = config["vocab_size"]
    engine = open_engine(options, {})
    resolved, figures = engine.resolved, {}
    probe = LimitProbe(options.threads)
    for num_rows in options.rows:
        rates = [probe.read() for _ in range(options.turns)]
        times = [
            statistics.median(decode_times(engine, options, num_rows, vocab_size))
            for _ in range(options.turns)
        ]
        num_bytes = resolved.memory.fixed.weights + 2 * num_rows * resolved.layout.state_bytes
        least = [num_bytes / 1e6 / rate for rate in rates]
        figures[f"{num_rows}_rows_step_ms"] = times
        figures[f"{num_rows}_rows_reading_ms"] = least
        share = statistics.median(least) / statistics.median(times)
        figures[f"{num_rows}_rows_share_of_reading"] = [share]
        print(f"{num_rows:3} rows: {statistics.median(times):.2f} ms, reading {share:.0%}")
    engines, changed = {"prompt": engine}, of_attention(config)
    if changed is not None:
        engines["attention_prompt"] = open_engine(options, changed)
    rates_of: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, options.turns):  # the first does not count
        (prompt,) = random_prompts([options.prompt_len], vocab_size, options.seed + turn + 1)
        for name, each in engines.items():
            rate = prompt_rate(each, prompt)
            if turn >= 0:
                rates_of[name].append(rate)
    for name, rates in rates_of.items():
        figures[f"{name}_tokens_per_second"] = rates
        print(f"{name}: {statistics.median(rates):.0f} tokens/s of {options.prompt_len}")
    workload = {"prompt_len": options.prompt_len, "steps_per_turn": options.steps}
    save_local_record("recurrent_cpu", options, engine, workload, figures)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=10, help="per turn")
    parser.add_argument("--prompt-len", type=int, default=1024)
    add_local_arguments(parser, turns_help="of each engine per number of rows")
    parser.set_defaults(model=parser.get_default("model").with_name("qwen3.5-0.8b"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
