"""How fast prompts are computed with more or fewer tokens in a step.

    python benchmarks/step_tokens.py [--quantization int8] [--output FILE]

One engine for each `max_num_batched_tokens`, all with the same random weights. By turns each
computes the same prompts, and one token of each request. Figures are prompt tokens per second, and
the milliseconds of a step, for which running sequences wait.
"""

# ruff: isort: skip_file
# quire_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import engines.quire_engine  # noqa: F401
import numpy as np
from engines.random_checkpoint import read_config

from quire.bench.lengths import random_prompts
from quire.bench.record import new_record, spread_of
from quire.bench.throughput import exact_params
from quire.llm import LLM
from quire.protocol.request import EngineRequest

STEP_TOKENS = (128, 256, 512, 1024, 2048)


class Prefiller:
    """An engine that computes prompts and nothing else."""

    def __init__(self, options: argparse.Namespace, step_tokens: int) -> None:
        self._llm = LLM(
            model=str(options.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            quiet=True,
            num_threads=options.threads,
            quantization=options.quantization,
            max_num_seqs=options.prompts,
            max_num_batched_tokens=step_tokens,
            max_model_len=options.prompt_len + 2,
            enable_prefix_caching=False,
            seed=options.seed,
            num_kv_blocks=options.prompts * (2 + options.prompt_len // 16),
        )
        self._client = self._llm.engine.client
        self.resolved = self._llm.engine.resolved
        self._next_handle = 0

    def compute(self, prompts: list[list[int]]) -> float:
        """Seconds."""
        for prompt in prompts:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            ids = np.array(prompt, np.int32)
            params = exact_params(1)
            self._client.add(EngineRequest(str(handle), handle, ids, params, handle, frozenset()))
        started = time.perf_counter()
        while self._client.has_unfinished:
            self._client.step()
        return time.perf_counter() - started


def main() -> int:
    options = parse_arguments()
    vocab_size = read_config(options.model)["vocab_size"]
    engines = {tokens: Prefiller(options, tokens) for tokens in options.step_tokens}
    seconds: dict[int, list[float]] = {tokens: [] for tokens in engines}
    lengths = [options.prompt_len] * options.prompts
    for turn in range(-1, options.turns):  # the first does not count
        prompts = random_prompts(lengths, vocab_size, options.seed + turn + 1)
        for tokens, engine in engines.items():
            taken = engine.compute(prompts)
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
    if options.output is not None:
        record = new_record(
            "step_tokens",
            sys.argv,
            engines[options.step_tokens[0]].resolved,
            None,
            seed=options.seed,
            workload={
                "model": options.model.name,
                "prompts": options.prompts,
                "prompt_len": options.prompt_len,
                "turns": options.turns,
            },
            figures={name: spread_of(values) for name, values in figures.items()},
        )
        record.save(options.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = Path(__file__).parent / "models"
    parser.add_argument("--model", type=Path, default=models / "qwen3-0.6b")
    parser.add_argument("--quantization", help="of the weights (none: as the model's dtype)")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=STEP_TOKENS)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
