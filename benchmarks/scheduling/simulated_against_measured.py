"""The simulator against this machine: throughput and mean TTFT of the same requests, both ways.

    python -m benchmarks.scheduling.simulated_against_measured [--seconds 30] [--repeats 3]

The bundled model and the Qwen3-0.6B shape with made-up weights serve Alpaca-like requests with
Poisson arrivals, in real time and `--repeats` times; the simulator serves them on `xeon-amx-2` with
the same settings. A virtual machine is not always equally fast. So before and after each repeat,
another trace with half as many requests per second tells how much slower than the device this
machine is (`slower`) and how long a request takes to enter (`enter_s`). How that holds for other
requests at twice the rate is what is compared. `times` are simulated over measured. Alone on such a
machine; 6 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.arguments import command_line, positive_number

from quire import LLM
from quire.bundled import bundled_model_path
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.entrypoints.simulator import (
    Device,
    Served,
    StepCost,
    SystemShape,
    build_core,
    device_named,
    serve,
)
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.workloads import TraceRequest, draw_trace, engine_requests
from quire.protocol import EngineRequest

SEED = 0
DEVICE = "xeon-amx-2"
QWEN = Path(__file__).parents[1] / "models" / "qwen3-0.6b"
MODELS = {"bundled": (bundled_model_path(), 60.0), "qwen3-0.6b": (QWEN, 2.0)}
"""Folder, and requests per second, by name."""

MAX_MODEL_LEN = 512
CALIBRATIONS = 6
"""Steps of the search for the two numbers, each of which changes both means."""

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


@dataclass(frozen=True, slots=True)
class Means:
    """Mean seconds to the first token, and between two tokens."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> Means:
        return cls(
            statistics.fmean(float(each.ttft_s.mean()) for each in served),
            statistics.fmean(float(each.tpot_s.mean()) for each in served),
        )


class Twin:
    """A model in an engine of this machine, and in the simulator with the same settings."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.llm = llm
        self._spec = model_spec(str(folder))

    def calibrated(self, requests: Sequence[EngineRequest], measured: Means) -> Device:
        """The device with which the simulator takes as long for these requests as was measured."""
        device = device_named(DEVICE)
        for _ in range(CALIBRATIONS):
            found = Means.of([self.simulate(requests, device)])
            slower = measured.tpot_s / found.tpot_s
            device = replace(
                device,
                bytes_per_s=device.bytes_per_s / slower,
                flop_per_s=device.flop_per_s / slower,
                launch_s=device.launch_s * slower,
                host_change_s=device.host_change_s * slower,
            )
            missing = measured.ttft_s - Means.of([self.simulate(requests, device)]).ttft_s
            device = replace(device, host_enter_s=max(device.host_enter_s + missing, 0.0))
        return device

    def simulate(self, requests: Sequence[EngineRequest], device: Device) -> Served:
        """The requests by the simulator, on this device."""
        chosen = self.llm.engine.resolved.settings
        cost = StepCost(device, self._spec, block_size=chosen.block_size)
        shape = SystemShape(
            num_kv_blocks=chosen.num_kv_blocks,
            block_size=chosen.block_size,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=chosen.max_model_len,
            depth=chosen.depth,
        )
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
        vocab_size = llm.engine.spec.vocab_size

        def drawn(share: float, seed: int) -> list[EngineRequest]:
            trace: list[TraceRequest] = draw_trace(
                "alpaca",
                rate=share * rate,
                seconds=share * seconds,
                seed=seed,
                max_model_len=MAX_MODEL_LEN,
            )
            return engine_requests(trace, vocab_size)

        requests, others = drawn(1.0, SEED), drawn(0.5, SEED + 1)
        measure(llm, engine_requests([TraceRequest(0.0, 19, 2)] * 8, vocab_size))
        twin = Twin(llm, folder)
        around, measured, simulated = [measure(llm, others)], list[Served](), list[Served]()
        devices: list[Device] = []
        for _ in range(repeats):
            measured.append(measure(llm, requests))
            around.append(measure(llm, others))
            devices.append(twin.calibrated(others, Means.of(around[-2:])))
            simulated.append(twin.simulate(requests, devices[-1]))
    parts = {
        "output_tokens_per_s": lambda served: served.output_tokens_per_s,
        "ttft_mean_s": lambda served: float(served.ttft_s.mean()),
        "tpot_mean_s": lambda served: float(served.tpot_s.mean()),
    }
    known = device_named(DEVICE)
    figures: dict[str, Spread] = {
        f"{name}.slower": spread_of([known.bytes_per_s / each.bytes_per_s for each in devices]),
        f"{name}.enter_s": spread_of([each.host_enter_s for each in devices]),
    }
    for part, value in parts.items():
        found, expected = ([value(each) for each in runs] for runs in (measured, simulated))
        figures[f"{name}.{part}.measured"] = spread_of(found)
        figures[f"{name}.{part}.simulated"] = spread_of(expected)
        pairs = zip(expected, found, strict=True)
        figures[f"{name}.{part}.times"] = spread_of([mine / other for mine, other in pairs])
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
