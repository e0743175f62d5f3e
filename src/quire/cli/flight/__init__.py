"""`quire flight`: shows a dump of the flight recorder, or writes it as a timeline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.cli.flight.perfetto import perfetto
from quire.cli.flight.table import lines_of
from quire.cli.parser import CommandParser
from quire.errors import ConfigError
from quire.platform.outputs import check_output
from quire.telemetry.flight.dump import decode_dump

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("dump", type=Path, help="file that a server or an engine wrote")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev instead"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="last steps and events to show of each core"
    )


def run(options: argparse.Namespace) -> int:
    """Do as asked. ConfigError, and so status 2, for a file that is no whole dump."""
    if options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}. Give 1 or more.")
    try:
        dump = decode_dump(options.dump.read_bytes())
    except OSError as error:
        raise ConfigError(f"{options.dump} cannot be read ({error.strerror})") from error
    except ConfigError as error:
        raise ConfigError(f"{options.dump}: {error}") from error
    if options.perfetto is None:
        print("\n".join(lines_of(dump, options.steps)))
        return 0
    output = check_output("--perfetto", options.perfetto, [options.dump])
    output.write(json.dumps(perfetto(dump)))
    print(f"wrote {options.perfetto}: open it at https://ui.perfetto.dev")
    return 0
