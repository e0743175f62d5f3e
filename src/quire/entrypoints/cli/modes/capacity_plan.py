"""The parts of `quire plan` that look at devices which are not at hand: capacity and memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.config.settings import EngineSettings
from quire.entrypoints.cli.flags.bench import count
from quire.entrypoints.cli.flags.engine import read_settings
from quire.entrypoints.cli.flags.output import check_output_flag
from quire.entrypoints.cli.flags.workload import add_workload_flags, read_workload
from quire.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from quire.config.model_spec import ModelSpec
    from quire.entrypoints.simulator.step_cost import StepCost

__all__ = ["add_arguments", "is_asked", "run"]

DEFAULT_SLO = "ttft=1s,tpot=50ms"
DEFAULT_ACCELERATORS = ("a100-80", "h100", "h200")
_MIXED = "Give either --workload, for devices that serve it, or --memory or --html, for sizes."


def add_arguments(parser: CommandParser) -> None:
    group = parser.add_argument_group("devices that serve a workload, by simulation")
    add_workload_flags(group, default=None)
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help=f"that 99 %% of the requests keep: ttft, tpot and e2e ({DEFAULT_SLO})",
    )
    group.add_argument(
        "--accelerators",
        nargs="+",
        metavar="NAME",
        help="a100-40, a100-80, h100, h200 or xeon-amx-2 (a100-80 h100 h200)",
    )
    group.add_argument("--tune", action="store_true", help="try settings, and print the best flags")
    group.add_argument("--plot", type=Path, metavar="FILE", help="goodput by rate, as SVG")
    group = parser.add_argument_group("memory of a model")
    group.add_argument("--memory", action="store_true", help="print sizes, for the flags below")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page to explore them")
    group.add_argument("--context", type=count, help="tokens that a request may have (2048)")
    group.add_argument("--tokens", type=count, help="tokens that it has (a quarter of the context)")
    group.add_argument("--batch", type=count, help="requests at a time (32)")


def is_asked(options: argparse.Namespace) -> bool:
    """Return whether the flags ask for any of it."""
    return bool(options.workload or options.memory or options.html)


def run(options: argparse.Namespace) -> int:
    """Print what was asked for, and write its files. ConfigError if nothing fits."""
    for flag, path in (("--html", options.html), ("--plot", options.plot)):
        check_output_flag(options, flag, path)
    settings = read_settings(options)
    name, spec = _model_of(options, settings)
    if options.workload is None:
        return _run_memory(options, settings, name, spec)
    if options.memory or options.html:
        raise ConfigError(_MIXED)
    return _run_capacity(options, settings, spec)


def _model_of(options: argparse.Namespace, settings: EngineSettings) -> tuple[str, ModelSpec]:
    from quire.config.startup import find_model
    from quire.entrypoints.simulator.models import MODEL_NAMES, model_spec

    name = options.model or options.model_flag or "the bundled model"
    if name in MODEL_NAMES:
        return name, model_spec(name)
    return Path(name).name, find_model(settings).spec


def _run_memory(
    options: argparse.Namespace, settings: EngineSettings, name: str, spec: ModelSpec
) -> int:
    from quire.config.kv_layout import KV_DTYPES
    from quire.entrypoints.simulator.explorer import (
        MemoryQuestion,
        explore,
        render_memory,
        render_page,
    )
    from quire.entrypoints.simulator.models import MODEL_NAMES

    context = options.context or min(2048, spec.max_context)
    device_bytes, device = _memory_of(options.accelerators, settings.device)
    spec = replace(spec, dtype=spec.dtype if settings.dtype == "auto" else settings.dtype)
    kv_dtype = settings.kv_cache_dtype
    kv_bytes = spec.dtype_bytes if kv_dtype == "auto" else KV_DTYPES.get(kv_dtype, (1, 0))[0]
    question = MemoryQuestion(
        weight_bits=0,
        weights=_weights_of(settings, spec, is_named=name in MODEL_NAMES),
        kv_bits=8 * kv_bytes,
        context=context,
        tokens=options.tokens or max(context // 4, 1),
        batch=options.batch or 32,
        block_size=settings.block_size or 16,
        device_bytes=device_bytes,
        device=device,
    )
    table = explore(spec, question)
    if options.html is not None:
        _write(options.html, render_page(name, spec, question))
    print(json.dumps(table.as_json(), indent=2) if options.json else render_memory(question, table))
    return 0


def _memory_of(names: list[str] | None, kind: str) -> tuple[int, str]:
    """Return the bytes of the first device that is named, or else of this machine, and whose they
    are. kind: the setting `device`."""
    from quire.base.platform import detect_platform
    from quire.entrypoints.simulator.devices import device_named

    if names:
        device = device_named(names[0])
        return device.memory_bytes, device.title
    platform = detect_platform()
    if kind != "cpu" and platform.gpu is not None and platform.gpu.memory_bytes:
        return platform.gpu.memory_bytes, f"{platform.gpu.name} of this machine"
    if not platform.free_bytes:
        raise ConfigError(
            "This machine does not say how much memory is free. Name a device by --accelerators."
        )
    return platform.free_bytes, "free on this machine"


def _weights_of(settings: EngineSettings, spec: ModelSpec, *, is_named: bool) -> int:
    """Return the bytes of the weights in memory, as a plan counts them. is_named: the model is one
    of the papers, which has no files."""
    from quire.config.checkpoint import read_checkpoint
    from quire.config.memory.plan import weight_bytes
    from quire.config.startup import find_model, lacks_weights

    checkpoint = None
    if not is_named and settings.load_format != "dummy":
        folder = find_model(settings).folder
        checkpoint = None if lacks_weights(folder) else read_checkpoint(folder)
    return weight_bytes(spec, checkpoint, settings.quantization)


def _run_capacity(options: argparse.Namespace, settings: EngineSettings, spec: ModelSpec) -> int:
    from quire.entrypoints.simulator.planner import parse_slo, plan_capacity, render_capacity, tune
    from quire.entrypoints.simulator.planner.text import capacity_figure
    from quire.entrypoints.simulator.svg import draw_figure

    slo = parse_slo(options.slo or DEFAULT_SLO)
    given = _given_shape(settings)
    trace = read_workload(options, given.get("max_model_len", spec.max_context))

    def make_cost(device: str, degree: int) -> StepCost:
        return _cost_of(device, degree, spec, settings)

    plan = plan_capacity(
        trace, slo, make_cost, options.accelerators or DEFAULT_ACCELERATORS, **given
    )
    found: dict[str, Any] = plan.as_json()
    text = render_capacity(plan)
    if options.tune:
        best = plan.options[0]
        values = {"max_model_len": spec.max_context, **given}
        tuned = tune(trace, slo, make_cost(best.device, best.degree), values, best)
        found["tuned"] = tuned.as_json()
        text += (
            f"\n\nof {tuned.trials} settings, the one with the most room below the limits "
            f"({tuned.strain_before:.2f} of them used before, {tuned.strain:.2f} then):\n"
            f"quire serve {tuned.flags}"
        )
    if options.plot is not None:
        _write(options.plot, draw_figure(capacity_figure(plan)))
    print(json.dumps(found, indent=2) if options.json else text)
    return 0


def _cost_of(device: str, degree: int, spec: ModelSpec, settings: EngineSettings) -> StepCost:
    from quire.config.kv_layout import KV_DTYPES
    from quire.entrypoints.simulator.devices import device_named
    from quire.entrypoints.simulator.step_cost import StepCost

    kv_dtype = settings.kv_cache_dtype
    return StepCost(
        device_named(device),
        spec,
        num_devices=degree,
        block_size=settings.block_size or 16,
        weight_bits=_weight_bits(settings),
        kv_bytes=None if kv_dtype == "auto" else KV_DTYPES.get(kv_dtype, (1, 0))[0],
    )


def _weight_bits(settings: EngineSettings) -> int | None:
    """Return the bits of a weight under `quantization`; None as the checkpoint has them."""
    if settings.quantization is None:
        return None
    return 8 if settings.quantization == "int8" else 4


def _given_shape(settings: EngineSettings) -> dict[str, Any]:
    """Return the settings of a simulated server that the user gave."""
    names = (
        "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
        "scheduling_policy", "enable_prefix_caching", "long_prefill_token_threshold",
    )  # fmt: skip
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _write(path: Path, text: str) -> None:
    try:
        check_output("the page", path).write(text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}). Give another file."
        ) from error
