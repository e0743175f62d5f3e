"""The simulator against this machine: throughput and mean TTFT of the same requests, both ways.

    python -m benchmarks.scheduling.simulated_against_measured [--seconds 30] [--repeats 3]

The bundled model and the Qwen3-0.6B shape with made-up weights serve Alpaca-like requests with
Poisson arrivals, in real time and `--repeats` times; the simulator serves them on `xeon-amx-2` with
the same settings. `times` are simulated over measured. Alone on such a machine; 5 minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line, positive_number

from quire import LLM
from quire.bench.record import Spread, new_record, spread_of
from quire.bundled import bundled_model_path
from quire.protocol import EngineRequest
from quire.simulator import Served, StepCost, SystemShape, build_core, device_named, serve
from quire.simulator.models import model_spec
from quire.simulator.workloads import TraceRequest, draw_trace, engine_requests

SEED = 0
DEVICE = "xeon-amx-2"
QWEN = Path(__file__).parents[1] / "models" / "qwen3-0.6b"
MODELS = {"bundled": (bundled_model_path(), 60.0), "qwen3-0.6b": (QWEN, 2.0)}
"""Folder, and requests per second, by name."""

MAX_MODEL_LEN = 512
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "simulated_against_measured.json"


def measure(llm: LLM, requests: Sequence[EngineRequest]) -> Served:
    """The requests in real time."""
    client = llm.engine.client
    first, finished = np.full(len(requests), np.inf), np.zeros(len(requests))
    waiting, started = list(requests), time.perf_counter()
    while waiting or client.has_unfinished:
        now = time.perf_counter() - started
        while waiting and waiting[0].arrival_time <= now:
            client.add(waiting.pop(0))
        if not client.has_unfinished:
            time.sleep(max(waiting[0].arrival_time - now, 0))
            continue
        output = client.step()
        now = time.perf_counter() - started
        first[output.handles] = np.minimum(first[output.handles], now)
        for finish in output.finished:
            finished[finish.handle] = now
    return Served(
        arrival_s=np.array([r.arrival_time for r in requests]),
        first_token_s=first,
        finished_s=finished,
        output_tokens=np.array([r.params.max_tokens for r in requests], np.int64),
        mean_running=0.0,
        num_preempted=0,
        num_steps=0,
        busy_s=0.0,
    )


def simulate(llm: LLM, folder: Path, requests: Sequence[EngineRequest]) -> Served:
    """The same requests by the simulator, with the settings of the engine."""
    chosen = llm.engine.resolved.settings
    shape = SystemShape(
        num_kv_blocks=chosen.num_kv_blocks,
        block_size=chosen.block_size,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_model_len=chosen.max_model_len,
        depth=chosen.depth,
    )
    cost = StepCost(device_named(DEVICE), model_spec(str(folder)), block_size=chosen.block_size)
    return serve(build_core(cost, shape), requests)


def compare(name: str, seconds: float, repeats: int) -> dict[str, Spread]:
    """Figures of one model and a trace of so many seconds."""
    folder, rate = MODELS[name]
    with LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        quiet=True,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    ) as llm:
        trace: list[TraceRequest] = draw_trace(
            "alpaca", rate=rate, seconds=seconds, seed=SEED, max_model_len=MAX_MODEL_LEN
        )
        requests = engine_requests(trace, llm.engine.spec.vocab_size)
        warm_up = [TraceRequest(0.0, each.prompt_tokens, 2) for each in trace[:8]]
        measure(llm, engine_requests(warm_up, llm.engine.spec.vocab_size))
        measured = [measure(llm, requests) for _ in range(repeats)]
        simulated = simulate(llm, folder, requests)
    parts = {
        "output_tokens_per_s": lambda served: served.output_tokens_per_s,
        "ttft_mean_s": lambda served: float(served.ttft_s.mean()),
        "tpot_mean_s": lambda served: float(served.tpot_s.mean()),
    }
    figures: dict[str, Spread] = {}
    for part, value in parts.items():
        found, expected = [value(served) for served in measured], value(simulated)
        figures[f"{name}.{part}.measured"] = spread_of(found)
        figures[f"{name}.{part}.simulated"] = spread_of([expected])
        figures[f"{name}.{part}.times"] = spread_of([expected / each for each in found])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=positive_number, default=30)
    parser.add_argument("--repeats", type=positive_number, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    figures: dict[str, Spread] = {}
    for name in arguments.models:
        figures |= compare(name, arguments.seconds, arguments.repeats)
    record = new_record(
        "simulated_against_measured",
        command_line(),
        None,
        None,
        seed=SEED,
        workload={
            "seconds": arguments.seconds,
            "requests_per_s": {name: MODELS[name][1] for name in arguments.models},
            "device": DEVICE,
            "lengths": "alpaca",
        },
        figures=figures,
    )
    record.save(arguments.output)
    for name, spread in record.figures.items():
        print(f"{name:45} {spread.median:12.4f}")


if __name__ == "__main__":
    main()
