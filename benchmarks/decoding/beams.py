"""Cost of beams compared with rows that draw: a step of eight searches of four beams.

    python -m benchmarks.decoding.beams [--steps 60] [--repeats 5] [--output FILE.json]

A model of one narrow layer with random weights, so that a step is spent around the model: for
beams, on the best candidates of 32 rows of logits, on choosing among them, forks and plans. Per
vocabulary: finding the candidates alone, on random logits, also with log-probabilities asked for;
a step of the searches, with one step in flight and with two; a step of 32 greedy requests, which
is what the model and all the rest take. Milliseconds, medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from benchmarks.arguments import command_line

from quire import LLM, SamplingParams
from quire.compute.sampling import SamplingState, find_candidates
from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.protocol import BeamRules, EngineRequest, IntArray

SEED = 0
VOCABULARIES = (32_768, 151_936)
NUM_SEARCHES, WIDTH = 8, 4
NUM_ROWS = NUM_SEARCHES * WIDTH
PROMPT_LEN = 32
NUM_WARM_STEPS = 10
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "beams.json"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class NoHistory:
    """Rows without edits are not asked for their tokens."""

    def prompt_ids(self, slot: int) -> IntArray:
        raise LookupError(slot)

    def output_ids(self, slot: int) -> IntArray:
        raise LookupError(slot)


def time_candidates(vocab_size: int, logprobs: int | None, steps: int) -> float:
    """Milliseconds to find the candidates of 32 rows."""
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3
    state = SamplingState(NUM_ROWS, vocab_size)
    params = SamplingParams(temperature=0.0, logprobs=logprobs)
    for slot in range(NUM_ROWS):
        state.enter(slot, params, SEED, 0, (), WIDTH + 1)
    rows, history = np.arange(NUM_ROWS), NoHistory()
    return _median_ms(lambda: find_candidates(logits, rows, rows, state, history), steps)


def requests(vocab_size: int, num_tokens: int, *, beams: bool) -> Iterable[EngineRequest]:
    """Eight searches, or as many greedy requests as they have beams."""
    count = NUM_SEARCHES if beams else NUM_ROWS
    for index, prompt in enumerate(random_prompts([PROMPT_LEN] * count, vocab_size, SEED)):
        yield EngineRequest(
            request_id=str(index),
            first_handle=2**30 + index,
            prompt_token_ids=np.array(prompt, np.int32),
            params=SamplingParams(max_tokens=num_tokens, temperature=0.0),
            seed=SEED,
            stop_token_ids=frozenset(),
            arrival_time=time.monotonic(),
            beams=BeamRules(WIDTH) if beams else None,
        )


def time_step(vocab_size: int, steps: int, *, beams: bool, depth: int = 1) -> float:
    """Milliseconds of a step in which all rows compute one token."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "vocab_size": vocab_size}))
        with LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, quiet=True, depth=depth,
            max_model_len=512, max_num_seqs=NUM_ROWS, num_kv_blocks=NUM_ROWS * 16,
        ) as llm:  # fmt: skip
            client = llm.engine.client
            for request in requests(vocab_size, NUM_WARM_STEPS + 2 * steps, beams=beams):
                client.add(request)
            for _ in range(NUM_WARM_STEPS):
                client.step()
            return _median_ms(client.step, steps)


def _median_ms(work: Callable[[], object], count: int) -> float:
    seconds: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def measure(vocab_size: int, steps: int) -> dict[str, float]:
    """Milliseconds, by name."""
    return {
        "candidates": time_candidates(vocab_size, None, steps),
        "candidates with logprobs=1": time_candidates(vocab_size, 1, steps),
        "step of beams": time_step(vocab_size, steps, beams=True),
        "step of beams, two in flight": time_step(vocab_size, steps, beams=True, depth=2),
        "step of greedy rows": time_step(vocab_size, steps, beams=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    values: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for vocab_size in VOCABULARIES:
            for name, value in measure(vocab_size, arguments.steps).items():
                values.setdefault(f"vocabulary {vocab_size}: {name}, ms", []).append(value)
    figures: dict[str, Spread] = {name: spread_of(found) for name, found in values.items()}
    for name, found in figures.items():
        print(f"{name:60s} {found.median:8.2f}  ({found.low:.2f} to {found.high:.2f})")
    workload = {"searches": NUM_SEARCHES, "width": WIDTH, "steps": arguments.steps, "model": MODEL}
    record = new_record(
        "beams",
        command_line(),
        None,
        None,
        seed=SEED,
        workload=workload,
        figures=figures,
    )
    record.save(arguments.output)


if __name__ == "__main__":
    main()
