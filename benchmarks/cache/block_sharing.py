"""Blocks that n samples and the beams of a search save by sharing.

    python -m benchmarks.cache.block_sharing [--requests 24] [--output FILE.json]

By the definition of Kwon et al. 2023 (PagedAttention, section 6.3, figure 15): blocks saved over
blocks without sharing, over all steps of a run. Real engine with the bundled model; prompts are its
own text (which beams branch on as on natural text), all different, with lengths like those of two
data sets (`quire.entrypoints.bench.lengths`). Outputs have their full length, as ends would shorten
some.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line

from quire import LLM, SamplingParams
from quire.entrypoints.bench.lengths import DATASETS, Workload, describe_lengths, draw_workload
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.protocol import BeamRules, EngineRequest

SEED = 0
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
SIZES = (2, 4, 6)
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "block_sharing.json"


def write_prompts(llm: LLM, workload: Workload) -> list[list[int]]:
    """Text of the model itself, of the wanted lengths."""
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=length, ignore_eos=True)
        for index, length in enumerate(workload.prompt_lengths)
    ]
    starts = [{"prompt_token_ids": [1]} for _ in params]
    return [output.outputs[0].token_ids for output in llm.generate(starts, params, use_tqdm=False)]


def requests(
    prompts: list[list[int]], lengths: tuple[int, ...], size: int, *, beams: bool
) -> Iterator[EngineRequest]:
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        yield EngineRequest(
            request_id=str(index),
            first_handle=2**30 + index * size,
            prompt_token_ids=np.array(prompt, np.int32),
            params=SamplingParams(n=size, max_tokens=length, temperature=0.0 if beams else 1.0),
            seed=index,
            arrival_time=time.monotonic(),
            beams=BeamRules(size) if beams else None,
            salt=f"{size} {beams}",
        )


def measure(llm: LLM, work: Iterator[EngineRequest]) -> tuple[float, float]:
    """Per cent of blocks saved, and seconds."""
    client = llm.engine.client
    started = time.perf_counter()
    for request in work:
        client.add(request)
    saved = entries = 0
    while client.has_unfinished:
        client.step()
        stats = client.stats()
        saved += stats.num_table_entries - stats.num_used_blocks
        entries += stats.num_table_entries
    return 100 * saved / entries, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    figures: dict[str, Spread] = {}
    with LLM(
        quiet=True, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, num_kv_blocks=6144,
        max_num_seqs=48, max_num_batched_tokens=512, skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        for name, (inputs, outputs) in DATASETS.items():
            workload = draw_workload(inputs, outputs, arguments.requests, SEED, MAX_MODEL_LEN)
            prompts = write_prompts(llm, workload)
            for size in SIZES:
                for kind, beams in (("samples", False), ("beams", True)):
                    work = requests(prompts, workload.output_lengths, size, beams=beams)
                    percent, seconds = measure(llm, work)
                    figures[f"{name}_{size}_{kind}_saved_percent"] = spread_of([percent])
                    print(f"{name} {size} {kind}: {percent:.1f} % saved, {seconds:.1f} s")
        record = new_record(
            "block_sharing",
            command_line(),
            llm.engine.resolved,
            None,
            seed=SEED,
            workload={
                "requests": arguments.requests,
                **{
                    name: [describe_lengths(lengths) for lengths in pair]
                    for name, pair in DATASETS.items()
                },
            },
            figures=figures,
        )
    record.save(arguments.output)


if __name__ == "__main__":
    main()
