"""`quire simulate`: a workload on devices that are not at hand."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from quire.entrypoints.cli.flags.bench import count, count_or_zero
from quire.entrypoints.cli.flags.workload import add_workload_flags, read_workload
from quire.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from quire.entrypoints.simulator import StepCost, SystemShape
    from quire.entrypoints.simulator.workloads import TraceRequest

__all__ = ["add_arguments", "read_simulation", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="opt-13b", help="a folder, or a model of the papers (opt-13b)"
    )
    parser.add_argument(
        "--accelerator",
        default="a100-40",
        metavar="NAME",
        help="a100-40, a100-80, h100, h200 or xeon-amx-2 (a100-40)",
    )
    parser.add_argument(
        "--num-accelerators",
        type=count,
        default=1,
        metavar="COUNT",
        help="accelerators that share the model, tensor-parallel (1)",
    )
    add_workload_flags(parser)
    _add_system_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Simulate, and print. ConfigError for models, devices and workloads that do not exist."""
    from quire.entrypoints.simulator.simulation import render_report, simulate

    cost, shape, trace = read_simulation(options)
    report = simulate(trace, cost, shape, seed=options.trace_seed)
    print(json.dumps(report.as_json(), indent=2) if options.json else render_report(report))
    return 0


def read_simulation(
    options: argparse.Namespace,
) -> tuple[StepCost, SystemShape, list[TraceRequest]]:
    """Return the times of steps, the server and the trace that the flags describe. ConfigError for
    models, devices and workloads that do not exist."""
    from quire.entrypoints.simulator import StepCost, device_named
    from quire.entrypoints.simulator.models import model_spec
    from quire.entrypoints.simulator.simulation import default_shape

    cost = StepCost(
        device_named(options.accelerator),
        model_spec(options.model),
        num_devices=options.num_accelerators,
        block_size=options.block_size,
    )
    shape = default_shape(cost, **_shape_values(options))
    return cost, shape, read_workload(options, shape.max_model_len)


def _add_system_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--num-kv-blocks", type=count, help="blocks of the KV cache (as many as the memory holds)"
    )
    parser.add_argument("--block-size", type=count, default=16, help="tokens of a KV block (16)")
    parser.add_argument("--max-num-seqs", type=count, default=256, help="requests in a step (256)")
    parser.add_argument(
        "--max-num-batched-tokens", type=count, default=2560, help="tokens in a step (2560)"
    )
    parser.add_argument(
        "--max-model-len", type=count, help="tokens of the longest request (the model's)"
    )
    parser.add_argument("--scheduling-policy", default="fcfs", help="see `quire serve` (fcfs)")
    parser.add_argument(
        "--preemption-mode", choices=("recompute", "swap", "auto"), default="recompute"
    )
    parser.add_argument(
        "--num-host-blocks", type=count_or_zero, default=0, help="blocks for swapped requests (0)"
    )
    parser.add_argument("--enable-prefix-caching", action="store_true", help="reuse prefixes")


def _shape_values(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "scheduling_policy", "preemption_mode", "num_host_blocks", "enable_prefix_caching",
    )  # fmt: skip
    values = {name: getattr(options, name) for name in names}
    if options.max_model_len is not None:
        values["max_model_len"] = options.max_model_len
    return values
