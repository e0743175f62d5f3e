"""The systems that the PagedAttention paper compares with, on a trace of yours.

    python -m benchmarks.paper.systems orca-max opt-66b --num-accelerators 4 --workload alpaca

Takes the flags of `quire simulate`, and prints the same report. Of the flags of a server the
systems take the number of slots (blocks times their size) and of sequences and tokens in a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.paper.baselines import (
    RESERVATIONS,
    OrcaMemory,
    serve_faster_transformer,
    serve_orca,
)

from quire.base.errors import ConfigError
from quire.entrypoints.cli.parser import CommandParser
from quire.entrypoints.cli.simulate import add_arguments, read_simulation
from quire.entrypoints.simulator import Served, StepCost
from quire.entrypoints.simulator.simulation import make_report, render_report
from quire.entrypoints.simulator.workloads import TraceRequest
from quire.entrypoints.simulator.workloads.trace import check_fits

__all__ = ["SYSTEM_NAMES", "serve_by"]

SYSTEM_NAMES = (*(f"orca-{name}" for name in RESERVATIONS), "faster-transformer")


def serve_by(
    system: str,
    trace: Sequence[TraceRequest],
    cost: StepCost,
    *,
    num_slots: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    memory: OrcaMemory | None = None,
) -> Served:
    """Serve a trace by one of `SYSTEM_NAMES`. cost: times with K/V in one piece. memory: filled by
    the kinds of Orca."""
    if system == "faster-transformer":
        return serve_faster_transformer(trace, cost, num_slots=num_slots)
    return serve_orca(
        trace,
        cost,
        RESERVATIONS[system.removeprefix("orca-")],
        num_slots=num_slots,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory=memory,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m benchmarks.paper.systems", description=__doc__)
    parser.add_argument("system", choices=SYSTEM_NAMES, help="a system of section 6.1")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        cost, shape, trace = read_simulation(options)
        check_fits(trace, shape.max_model_len)
        slots = shape.num_kv_blocks * shape.block_size
        served = serve_by(
            options.system,
            trace,
            StepCost(cost.device, cost.spec, num_devices=cost.num_devices, block_size=None),
            num_slots=slots,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    report = make_report(options.system, trace, cost, slots, served)
    print(json.dumps(report.as_json(), indent=2) if options.json else render_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
