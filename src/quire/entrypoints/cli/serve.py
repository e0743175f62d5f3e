"""`quire serve`: a model behind an OpenAI-shaped API."""

from __future__ import annotations

import argparse
import os

from quire.base.errors import ConfigError
from quire.config.settings import EngineSettings
from quire.config.startup import check_early
from quire.entrypoints.cli.flags.engine import add_engine_flags, given_settings
from quire.entrypoints.cli.flags.output import check_output_flag
from quire.entrypoints.cli.flags.server import add_server_flags, read_server_settings
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_config_flag()
    add_server_flags(parser)
    parser.refuse_empty("--api-key")  # a secret that was not filled in leaves no open server
    add_engine_flags(parser, server=True)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; without a model the bundled one, under its own name.
    ConfigError if the model or the server cannot start."""
    settings = EngineSettings.from_options(given_settings(options))
    server_settings = read_server_settings(options)
    if server_settings.api_key_weights and settings.scheduling_policy != "fair":
        raise ConfigError(
            f"--api-key-weights are for --scheduling-policy fair, not for "
            f"{settings.scheduling_policy}. Choose it, or leave them out."
        )
    check_output_flag(options, "--record-trace", server_settings.record_trace)
    check_output_flag(options, "--record-ui", server_settings.record_ui)
    from quire.server.readings.span_exporter import collector_of

    collector_of(server_settings.otlp_traces_endpoint, os.environ)
    check_early(settings)  # before the port opens
    from quire.server import run_server

    return run_server(settings, server_settings)
