"""Speed of prompts with more or fewer tokens in a step.

    python -m benchmarks.steps.step_tokens [--quantization int8] [--output FILE]

One engine for each `max_num_batched_tokens`, all with the same random weights. By turns each
computes the same prompts, and one token of each request. Figures are prompt tokens per second, and
the milliseconds of a step, for which running sequences wait.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.peers.engines.random_checkpoint import read_config
from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record

from quire.entrypoints.bench.lengths import random_prompts

STEP_TOKENS = (128, 256, 512, 1024)


def open_engine(options: argparse.Namespace, step_tokens: int) -> LocalEngine:
    return LocalEngine(
        options,
        max_num_seqs=options.prompts,
        max_num_batched_tokens=step_tokens,
        max_model_len=options.prompt_len + 2,
        num_kv_blocks=options.prompts * (2 + options.prompt_len // 16),
    )


def compute(engine: LocalEngine, prompts: list[list[int]]) -> float:
    """Seconds."""
    engine.add(prompts, output_len=1)
    started = time.perf_counter()
    engine.finish()
    return time.perf_counter() - started


def main() -> int:
    options = parse_arguments()
    vocab_size = read_config(options.model)["vocab_size"]
    engines = {tokens: open_engine(options, tokens) for tokens in options.step_tokens}
    seconds: dict[int, list[float]] = {tokens: [] for tokens in engines}
    lengths = [options.prompt_len] * options.prompts
    for turn in range(-1, options.turns):  # the first does not count
        prompts = random_prompts(lengths, vocab_size, options.seed + turn + 1)
        for tokens, engine in engines.items():
            taken = compute(engine, prompts)
            if turn >= 0:
                seconds[tokens].append(taken)
    figures: dict[str, list[float]] = {}
    total = sum(lengths)
    for tokens, taken in seconds.items():
        rates = [total / each for each in taken]
        steps = [1000 * each / -(-total // tokens) for each in taken]
        figures |= {f"{tokens}_tokens_per_second": rates, f"{tokens}_step_ms": steps}
        print(
            f"{tokens:5} tokens: {statistics.median(rates):7.0f} tokens/s"
            f" ({min(rates):.0f}-{max(rates):.0f}), {statistics.median(steps):6.1f} ms per step"
        )
    workload = {"prompts": options.prompts, "prompt_len": options.prompt_len}
    save_local_record("step_tokens", options, engines[options.step_tokens[0]], workload, figures)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-tokens", type=int, nargs="+", default=STEP_TOKENS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    add_local_arguments(parser, turns_help="of each engine")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
