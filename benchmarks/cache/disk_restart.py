"""A prompt after a restart: computed anew, or read from the disk; and what saving costs.

    python -m benchmarks.cache.disk_restart [--model FOLDER] [--turns 9] [--output FILE.json]

Each turn starts an engine, asks for the first token of a prompt of 1,500 random tokens (cold), ends
it, starts another on the same folder, and asks again (warm), after a short prompt that touches
memory. Then engines with and without a disk take turns at distinct prompts and outputs, and their
processor seconds per token are compared. The index is that of a million blocks in chains of 94.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line

from quire import LLM, SamplingParams
from quire.config.kv_disk.records import HEADER_BYTES, RECORD, read_records, seal
from quire.entrypoints.bench.record import new_record, spread_of
from quire.plan.kv_cache.disk_index import DiskIndex

PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 64
NUM_BLOCKS = 1_000_000
CHAIN = 94
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "disk_restart.json"
SETTINGS = {"quiet": True, "skip_tokenizer_init": True, "max_model_len": 2048, "max_num_seqs": 8}


def prompt(seed: int, length: int = PROMPT_TOKENS) -> dict[str, list[int]]:
    return {"prompt_token_ids": np.random.default_rng(seed).integers(5, 900, length).tolist()}


def first_token(model: str | None, folder: str, seed: int) -> tuple[float, int]:
    """Seconds to the first token, of an engine that starts for it, and cached tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(model, kv_disk=folder, **SETTINGS) as llm:
        llm.generate(prompt(10**6 + seed, 64), params, use_tqdm=False)
        started = time.perf_counter()
        (found,) = llm.generate(prompt(seed), params, use_tqdm=False)
        return time.perf_counter() - started, found.num_cached_tokens or 0


def cpu_per_token(llm: LLM, seed: int) -> float:
    """Microseconds of processors per token of a prompt and an output that nobody has seen."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.process_time()
    llm.generate([prompt(seed * 100 + i, 500) for i in range(4)], params, use_tqdm=False)
    return 1e6 * (time.process_time() - started) / (4 * (500 + OUTPUT_TOKENS))


def index_seconds(folder: Path) -> float:
    """Processor seconds from the header file of a million blocks to an index."""
    names = np.random.default_rng(0).bytes(16 * NUM_BLOCKS)
    records = np.zeros(NUM_BLOCKS, RECORD)
    records["name"] = np.frombuffer(names, "V16")
    records["parent"][1:] = records["name"][:-1]
    records["depth"] = np.arange(NUM_BLOCKS) % CHAIN
    records["value"] = 1.0
    records["seal"] = seal(records)
    path = folder / "header"
    path.write_bytes(bytes(HEADER_BYTES) + records.tobytes())
    started = time.process_time()
    index = DiskIndex(NUM_BLOCKS, read_records(path, NUM_BLOCKS))
    seconds = time.process_time() - started
    assert index.num_named == NUM_BLOCKS
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    cold, warm, plain, saving, index = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            for found, hit in ((cold, 0), (warm, PROMPT_TOKENS // 16 * 16)):
                seconds, cached = first_token(arguments.model, folder, turn)
                assert cached == min(hit, PROMPT_TOKENS - 12), (cached, hit)
                found.append(1000 * seconds)
        with (
            LLM(arguments.model, **SETTINGS) as without,
            LLM(arguments.model, kv_disk=folder, **SETTINGS) as with_disk,
        ):
            for turn in range(arguments.turns + 1):
                pairs = [(without, plain), (with_disk, saving)]
                for llm, found in pairs[:: 1 if turn % 2 else -1]:
                    found.append(cpu_per_token(llm, 5000 + turn))
            index += [index_seconds(Path(folder)) for _ in range(3)]
            ratio = [s / p - 1 for s, p in zip(saving[1:], plain[1:], strict=True)]
            figures = {
                "cold_ttft_ms": spread_of(cold),
                "warm_ttft_ms": spread_of(warm),
                "cpu_us_per_token": spread_of(plain[1:]),
                "cpu_us_per_token_saving": spread_of(saving[1:]),
                "saving_percent": spread_of([100 * each for each in ratio]),
                "index_of_a_million_cpu_s": spread_of(index),
            }
            record = new_record(
                "disk_restart",
                command_line(),
                with_disk.engine.resolved,
                None,
                seed=0,
                workload={"prompt_tokens": PROMPT_TOKENS, "turns": arguments.turns},
                figures=figures,
            )
    for name, figure in figures.items():
        print(name, figure)
    record.save(arguments.output)


if __name__ == "__main__":
    main()
