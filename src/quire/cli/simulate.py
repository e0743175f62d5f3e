"""`quire simulate`: a workload on devices that are not at hand, and the figures of the papers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.cli.flags.bench import count, count_or_zero
from quire.cli.flags.workload import add_workload_flags, positive, read_workload
from quire.cli.parser import CommandParser
from quire.errors import ConfigError

__all__ = ["add_arguments", "run"]

NEVER_IN_PAPER = "--figures, --scale and --jobs belong to --paper"


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
    group = parser.add_argument_group("figures of the papers")
    group.add_argument(
        "--paper",
        type=Path,
        metavar="FOLDER",
        help="simulate the figures instead, and write them to this folder",
    )
    group.add_argument("--figures", nargs="+", metavar="NAME", help="some of them: 2 12 18b …")
    group.add_argument(
        "--scale",
        type=_share,
        metavar="SHARE",
        help="share of the length of traces, to try things quickly (1)",
    )
    group.add_argument("--jobs", type=count, metavar="COUNT", help="simulations side by side (2)")


def run(options: argparse.Namespace) -> int:
    """Simulate, and print. ConfigError for models, devices and workloads that do not exist."""
    if options.paper is not None:
        return _run_paper(options)
    if options.figures or options.scale or options.jobs:
        raise ConfigError(f"{NEVER_IN_PAPER}: give a folder with --paper FOLDER")
    from quire.simulator import StepCost, device_named
    from quire.simulator.models import model_spec
    from quire.simulator.simulation import default_shape, render_report, simulate

    cost = StepCost(
        device_named(options.accelerator),
        model_spec(options.model),
        num_devices=options.num_accelerators,
        block_size=options.block_size,
    )
    shape = default_shape(cost, **_shape_values(options))
    trace = read_workload(options, shape.max_model_len)
    report = simulate(trace, cost, shape, system=options.system, seed=options.trace_seed)
    print(json.dumps(report.as_json(), indent=2) if options.json else render_report(report))
    return 0


def _add_system_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--system",
        default="quire",
        metavar="NAME",
        help="quire, orca-oracle, orca-pow2, orca-max or faster-transformer (quire)",
    )
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


def _run_paper(options: argparse.Namespace) -> int:
    from quire.simulator.paper import (
        FIGURES,
        check_folder,
        make_figures,
        write_figure,
        write_table,
    )

    keys = options.figures or list(FIGURES)
    check_folder(options.paper, keys)
    scale = options.scale or 1.0
    for figure in make_figures(keys, jobs=options.jobs or 2, scale=scale):
        write_figure(figure, options.paper, scale)
    print(write_table(options.paper, scale), end="")
    return 0


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value
