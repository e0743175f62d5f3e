"""Throughput of the engine on this machine when all prompts share a prefix of 80 or 341 tokens.

    python -m benchmarks.cache.shared_prefix [--requests 384] [--repeats 5] [--output FILE]

The workload of the PagedAttention paper's section 6.4 (`translation.py`) with the bundled model:
without reuse of prefixes (off), with automatic reuse (cached), and with the prefix pinned, so that
its partly filled last block is shared too (pinned). The three take turns, each with the same new
sentences, so that nothing but the prefix can be reused. Requests per second, all waiting at first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.arguments import command_line
from benchmarks.cache.translation import (
    PREFIX_TOKENS,
    Tokens,
    Translations,
    draw_translations,
    make_prefix,
)

from quire import LLM, SamplingParams
from quire.entrypoints.bench.machine import measure_limits
from quire.entrypoints.bench.record import Spread, new_record, spread_of

DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "shared_prefix.json"
SEED = 0
SYSTEMS = ("off", "cached", "pinned")


def open_engine(system: str) -> LLM:
    """The bundled model."""
    return LLM(
        quiet=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enable_prefix_caching=system != "off",
    )


def run_engine(llm: LLM, work: Translations, prefix: Tokens) -> float:
    """Requests per second of all of the work."""
    asks = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts(prefix)]
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        for length in work.output_lengths
    ]
    started = time.perf_counter()
    outputs = llm.generate(asks, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == work.num_output_tokens
    return len(asks) / seconds


def measure(engines: Mapping[str, LLM], count: int, repeats: int) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    vocab_size = engines["off"].engine.spec.vocab_size
    for num_prefix in PREFIX_TOKENS:
        prefix = make_prefix(num_prefix, vocab_size)
        engines["pinned"].pin_prefix({"prompt_token_ids": prefix.tolist()})
        for repeat in range(repeats + 1):  # the first one warms up
            work = draw_translations(count, vocab_size, SEED + repeat)
            rates = {system: run_engine(llm, work, prefix) for system, llm in engines.items()}
            for system, rate in rates.items() if repeat else ():
                values.setdefault(f"{num_prefix}.{system}.requests_per_s", []).append(rate)
                gain = values.setdefault(f"{num_prefix}.{system}.times_off", [])
                gain.append(rate / rates["off"])
    return {name: spread_of(found) for name, found in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        engines = {system: stack.enter_context(open_engine(system)) for system in SYSTEMS}
        figures = measure(engines, arguments.requests, arguments.repeats)
        resolved = engines["pinned"].engine.resolved
    vocab_size = engines["off"].engine.spec.vocab_size
    record = new_record(
        "shared_prefix",
        command_line(),
        resolved,
        measure_limits(resolved.settings.num_threads),
        seed=SEED,
        workload=draw_translations(arguments.requests, vocab_size, SEED).describe(),
        figures=figures,
    )
    record.save(arguments.output)
    for name, spread in record.figures.items():
        print(f"{name:32} {spread.median:9.2f}  ({spread.low:.2f} to {spread.high:.2f})")


if __name__ == "__main__":
    main()
