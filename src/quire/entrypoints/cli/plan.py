"""`quire plan` shows the needs of a model here, from its config and file headers alone; and the
number of devices of other kinds that serve a workload."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from quire.base.platform import detect_platform
from quire.config.render_plan import render_plan
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, find_model, lacks_weights, plan_startup
from quire.engine.kernel_choice import choose_kernels, see_kernels
from quire.entrypoints.cli.flags.engine import add_engine_flags, read_settings, setting_sources
from quire.entrypoints.cli.modes import capacity_plan
from quire.entrypoints.cli.parser import CommandParser, print_note

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_config_flag(_parser_of_serve)
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    capacity_plan.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the plan. ConfigError, and so status 2, if the model cannot run here as asked."""
    if capacity_plan.is_asked(options):
        return capacity_plan.run(options)
    platform = see_kernels(detect_platform())
    kernels = choose_kernels(_without_weights(read_settings(options)), platform)
    plan = plan_startup(kernels.settings, platform)
    plan = replace(plan, resolved=kernels.explained(plan.resolved))
    sources = {name: value.source for name, value in setting_sources(options).items()}
    if options.json:
        print(json.dumps({**_as_json(plan), "sources": sources}, indent=2))
        return 0
    print(render_plan(plan.resolved))
    if sources:
        print("given elsewhere")
        width = max(map(len, sources))
        print("\n".join(f"  {name:<{width}}  {source}" for name, source in sources.items()))
    return 0


def _without_weights(settings: EngineSettings) -> EngineSettings:
    """The settings, by which config.json alone counts where a folder has no weights."""
    if settings.load_format == "dummy":
        return settings
    folder = find_model(settings).folder
    if not lacks_weights(folder):
        return settings
    print_note(f"{folder} has no weights, so they are counted by config.json")
    return replace(settings, load_format="dummy")


def _parser_of_serve() -> CommandParser:
    """Config files are a server's; its other flags change nothing of a plan."""
    from quire.entrypoints.cli import serve

    parser = CommandParser(prog="quire serve")
    serve.add_arguments(parser)
    return parser


def _as_json(plan: StartupPlan) -> dict[str, object]:
    resolved, memory = plan.resolved, plan.resolved.memory
    return {
        "model": str(plan.folder),
        "gpu": resolved.platform.gpu and asdict(resolved.platform.gpu),
        "architecture": resolved.spec.architecture,
        "num_parameters": resolved.spec.num_parameters,
        "settings": asdict(resolved.settings),
        "decisions": [asdict(decision) for decision in resolved.decisions],
        "memory": {**asdict(memory), "kv_cache": memory.kv_cache, "total": memory.total},
        "expanded_kv_elements": resolved.spec.expanded_kv_elements,
    }
