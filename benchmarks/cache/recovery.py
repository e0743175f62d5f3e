"""Preempted requests: computed again, or swapped to host memory and back, by block size.

    python -m benchmarks.cache.recovery [--model benchmarks/models/qwen3-0.6b] [--output FILE]

First what a token costs either way, as an engine with preemption_mode="auto" measures it at start;
then the throughput of a workload whose KV cache is much too small, with either way forced, by turns
(the paper's section 7.3 and figure 19). Random weights; every engine serves the same requests.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.arguments import command_line

from quire import LLM, SamplingParams
from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.machine import measure_limits
from quire.entrypoints.bench.record import new_record, spread_of

MODELS = Path(__file__).parents[1] / "models"
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SWAP_SPACE = "2GiB"
SEED = 0


def measured_costs(model: Path, block_size: int) -> tuple[float, float]:
    """Microseconds per token: to compute it again, and to copy it out and in."""
    with open_engine(model, block_size, "auto", pool_tokens=1024) as llm:
        costs = llm.engine.recovery_costs
        assert costs is not None
        swapping = 2 * costs.seconds_per_block / block_size
        return 1e6 * costs.seconds_per_token, 1e6 * swapping


def open_engine(model: Path, block_size: int, mode: str, pool_tokens: int) -> LLM:
    return LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        quiet=True,
        block_size=block_size,
        num_kv_blocks=pool_tokens // block_size,
        max_model_len=512,
        swap_space=SWAP_SPACE,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )


def throughput(llm: LLM, arguments: argparse.Namespace) -> float:
    """Output tokens per second of the whole workload."""
    lengths = [arguments.input_len] * arguments.requests
    prompts = random_prompts(lengths, llm.engine.spec.vocab_size, SEED)
    params = SamplingParams(max_tokens=arguments.output_len, ignore_eos=True, temperature=0.0)
    asks = [{"prompt_token_ids": prompt} for prompt in prompts]
    started = time.perf_counter()
    llm.generate(asks, params, use_tqdm=False)
    return arguments.requests * arguments.output_len / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODELS / "qwen3-0.6b", help="of the costs")
    parser.add_argument("--served", type=Path, default=MODELS / "llama-12m", help="that serves")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pool-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    values: dict[str, list[float]] = {}
    preempted: dict[str, int] = {}
    for size in BLOCK_SIZES:
        for _ in range(arguments.repeats):
            computing, swapping = measured_costs(arguments.model, size)
            values.setdefault(f"block {size}: recompute, us/token", []).append(computing)
            values.setdefault(f"block {size}: swap, us/token", []).append(swapping)
        with (
            open_engine(arguments.served, size, "recompute", arguments.pool_tokens) as computes,
            open_engine(arguments.served, size, "swap", arguments.pool_tokens) as swaps,
        ):
            engines = {"recompute": computes, "swap": swaps}
            for repeat in range(arguments.repeats + 1):
                for mode, llm in engines.items():
                    rate = throughput(llm, arguments)
                    if repeat:
                        name = f"block {size}: {mode}, output tokens/s"
                        values.setdefault(name, []).append(rate)
            for mode, llm in engines.items():
                preempted[f"block {size}: {mode}"] = llm.engine.client.stats().preempted_total
    figures = {name: spread_of(found) for name, found in values.items()}
    for name, found in figures.items():
        print(f"{name:42s} {found.median:10.2f}  ({found.low:.2f} to {found.high:.2f})")
    if arguments.output is not None:
        workload = {
            "model_of_costs": arguments.model.name,
            "model_that_serves": arguments.served.name,
            "requests": arguments.requests,
            "input_len": arguments.input_len,
            "output_len": arguments.output_len,
            "pool_tokens": arguments.pool_tokens,
            "preempted_in_all_repeats": preempted,
        }
        record = new_record(
            "recovery",
            command_line(),
            None,
            measure_limits(os.cpu_count() or 1),
            seed=SEED,
            workload=workload,
            figures=figures,
        )
        record.save(arguments.output)


if __name__ == "__main__":
    main()
