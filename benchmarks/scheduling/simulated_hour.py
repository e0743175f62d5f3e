"""Processor time of a simulated hour: OPT-13B on an A100 at 2 requests per second of ShareGPT.

    python -m benchmarks.scheduling.simulated_hour [--seconds 3600] [--output FILE.json]

The hour is served twice, with the same seed: once for its processor time, which is that of one
thread, and once with a clock around the real engine core and another around the executor within it,
for the share that is the simulator's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.arguments import command_line

from quire.base.errors import EngineError
from quire.entrypoints.bench.record import new_record, spread_of
from quire.entrypoints.simulator import Served, StepCost, build_core, device_named, serve
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.simulation import default_shape
from quire.entrypoints.simulator.system import BuiltSystem
from quire.entrypoints.simulator.workloads import draw_trace, engine_requests

SEED = 0
RATE = 2.0
COST = StepCost(device_named("a100-40"), model_spec("opt-13b"))
DEFAULT_OUTPUT = Path(__file__).parents[1] / "results" / "simulated_hour.json"

P = ParamSpec("P")
R = TypeVar("R")


class ProcessorClock:
    """Sums the processor time that wrapped functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with its time counted."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return timed


def make_system() -> BuiltSystem:
    return build_core(COST, default_shape(COST), SEED)


def serve_hour(system: BuiltSystem, seconds: float) -> tuple[Served, float]:
    """The trace as it was served, and the processor time of that."""
    trace = draw_trace(
        "sharegpt", rate=RATE, seconds=seconds, seed=SEED, max_model_len=COST.spec.max_context
    )
    requests = engine_requests(trace, COST.spec.vocab_size)
    began = time.process_time()
    served = serve(system, requests)
    return served, time.process_time() - began


def own_share(seconds: float) -> tuple[float, str]:
    """Share of the processor time that is not the real core's, and the hash of the run."""
    system = make_system()
    core, executor = ProcessorClock(), ProcessorClock()
    system.core.step = core.around(system.core.step)
    system.core.add = core.around(system.core.add)
    system.executor.execute = executor.around(system.executor.execute)
    served, total = serve_hour(system, seconds)
    return 1 - (core.seconds - executor.seconds) / total, served.trace_hash


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    served, processor_s = serve_hour(make_system(), arguments.seconds)
    share, again = own_share(arguments.seconds)
    if again != served.trace_hash:
        raise EngineError(f"equal seeds gave other runs: {served.trace_hash} and {again}")
    values = {
        "processor_s": processor_s,
        "simulators_share": share,
        "microseconds_per_step": 1e6 * processor_s / served.num_steps,
        "steps": float(served.num_steps),
        "requests": float(len(served.arrival_s)),
        "mean_running": served.mean_running,
        "normalized_latency_s": served.normalized_latency_s,
    }
    record = new_record(
        "simulated_hour",
        command_line(),
        None,
        None,
        seed=SEED,
        workload={
            "lengths": "sharegpt",
            "requests_per_s": RATE,
            "seconds": arguments.seconds,
            "trace_hash": served.trace_hash,
            "cost": COST.describe(),
        },
        figures={name: spread_of([value]) for name, value in values.items()},
    )
    record.save(arguments.output)
    for name, spread in record.figures.items():
        print(f"{name:25} {spread.median:12.4f}")


if __name__ == "__main__":
    main()
