"""Request rates with a prefix that all prompts share: the PagedAttention paper's section 6.4.

    python -m benchmarks.cache.shared_prefix_simulated [--requests 3000] [--output FILE]

LLaMA-13B on an A100 with the 15,700 KV slots of the paper's table 1, by
`quire.entrypoints.simulator`: without reuse of prefixes (off), with automatic reuse (cached), and
with the prefix pinned, so that its partly filled last block is shared too (pinned); and Orca
(Oracle) in the same memory. `make paper` has the curves of the paper's figure 16; what no reuse
costs and a pin brings is here. Requests per second while all wait, and at shares of that rate the
mean normalized latency: seconds from arrival to end per output token. The same on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line
from benchmarks.cache.translation import (
    PREFIX_TOKENS,
    Tokens,
    Translations,
    draw_translations,
    make_prefix,
)
from benchmarks.paper.baselines import RESERVATIONS, serve_orca

from quire.entrypoints.bench.record import new_record, spread_of
from quire.entrypoints.simulator import (
    Served,
    StepCost,
    SystemShape,
    build_core,
    device_named,
    serve,
)
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.workloads import TraceRequest
from quire.protocol import EngineRequest, SamplingParams
from quire.protocol.pins import PIN_PARAMS

DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "shared_prefix_simulated.json"
SEED = 0
DEVICE, MODEL = device_named("a100-40"), model_spec("llama-13b")
COST = StepCost(DEVICE, MODEL)
NUM_SLOTS = 15_700  # of tokens; table 1 of the paper
BLOCK_SIZE = 16
MAX_NUM_SEQS = 1024  # the memory is the limit
STEP_TOKENS = 2560
MAX_MODEL_LEN = 2048
VOCAB = 32000
SYSTEMS = ("off", "cached", "pinned", "orca")
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
PIN_HANDLE = 2**30


def shape(reuses_prefixes: bool) -> SystemShape:
    return SystemShape(
        num_kv_blocks=NUM_SLOTS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=reuses_prefixes,
    )


def make_requests(
    work: Translations, prefix: Tokens, arrivals: Sequence[float]
) -> list[EngineRequest]:
    prompts = work.prompts(prefix)
    return [
        EngineRequest(
            request_id=str(handle),
            first_handle=handle,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=length),
            seed=handle,
            arrival_time=at_s,
        )
        for handle, (prompt, length, at_s) in enumerate(
            zip(prompts, work.output_lengths, arrivals, strict=True)
        )
    ]


def simulate(system: str, work: Translations, prefix: Tokens, arrivals: Sequence[float]) -> Served:
    """All of the work, by one of SYSTEMS."""
    requests = make_requests(work, prefix, arrivals)
    if system == "orca":
        trace = [
            TraceRequest(r.arrival_time, len(r.prompt_token_ids), r.params.max_tokens or 1)
            for r in requests
        ]
        return serve_orca(
            trace,
            StepCost(DEVICE, MODEL, block_size=None),
            RESERVATIONS["oracle"],
            num_slots=NUM_SLOTS,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=STEP_TOKENS,
        )
    built = build_core(COST, shape(reuses_prefixes=system != "off"))
    if system == "pinned":
        built.core.add(
            EngineRequest("pin", PIN_HANDLE, prefix, PIN_PARAMS, SEED, pin_seconds=float("inf"))
        )
        while built.core.has_unfinished:
            built.core.step(0.0)
        built.clock.now = 0.0
    return serve(built, requests)


def figures_of(work: Translations) -> Iterator[tuple[str, float]]:
    """Name and value of each."""
    gaps = np.random.default_rng(SEED).exponential(1.0, len(work.sentences))
    for num_prefix in PREFIX_TOKENS:
        prefix = make_prefix(num_prefix, VOCAB)
        for system in SYSTEMS:
            name = f"{num_prefix}.{system}"
            served = simulate(system, work, prefix, [0.0] * len(gaps))
            rate = served.requests_per_s
            yield f"{name}.requests_per_s", rate
            yield f"{name}.mean_running", served.mean_running
            yield f"{name}.preempted", served.num_preempted
            for load in LOADS:
                arrivals = np.cumsum(gaps / (rate * load)).tolist()
                served = simulate(system, work, prefix, arrivals)
                yield f"{name}.s_per_token_at_{load}", served.normalized_latency_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    work = draw_translations(arguments.requests, VOCAB, SEED)
    record = new_record(
        "shared_prefix_simulated",
        command_line(),
        None,
        None,
        seed=SEED,
        workload={
            **work.describe(),
            "cost": COST.describe(),
            "kv_slots": NUM_SLOTS,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": STEP_TOKENS,
        },
        figures={name: spread_of([round(value, 4)]) for name, value in figures_of(work)},
    )
    record.save(arguments.output)
    for name, spread in record.figures.items():
        print(f"{name:40} {spread.median:10.3f}")


if __name__ == "__main__":
    main()
