"""`quire cache`: shows, checks and clears a folder of `--kv-disk`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.kv_disk.check import StoreReading, clear, read_store, verify
from quire.config.kv_disk.folder import KVFolder
from quire.config.memory.amounts import format_bytes
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]

EXIT_DAMAGED = 1


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "action",
        choices=("info", "verify", "clear"),
        help="list the stores; read all of them and compare checksums; remove them",
    )
    parser.add_argument("kv_disk", type=Path, metavar="folder", help="that of --kv-disk")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Do as asked. Status 1 if `verify` found damage. ConfigError, and so status 2, for a folder
    that is not there, or that an engine writes while it is to be cleared."""
    folder = KVFolder(options.kv_disk)
    if not options.kv_disk.is_dir():
        raise ConfigError(f"{options.kv_disk} is no folder. Give that of --kv-disk.")
    if options.action == "clear":
        num_bytes = clear(folder)
        print(json.dumps({"num_bytes": num_bytes}) if options.json else _freed(num_bytes))
        return 0
    found: list[StoreReading] = []
    for files, header in folder.stores():
        reading = read_store(files, header)
        if options.action == "verify":
            reading = replace(reading, damaged=verify(files, header))
        found.append(reading)
    print(json.dumps([asdict(each) for each in found]) if options.json else _lines(found))
    return EXIT_DAMAGED if any(each.damaged for each in found) else 0


def _freed(num_bytes: int) -> str:
    return f"removed {format_bytes(num_bytes)}"


def _lines(found: Sequence[StoreReading]) -> str:
    if not found:
        return "no stores"
    return "\n".join(_line(each) for each in found)


def _line(found: StoreReading) -> str:
    line = (
        f"{found.model}: {found.num_blocks:,} of {found.max_blocks:,} blocks, "
        f"{format_bytes(found.num_bytes)} of {format_bytes(found.max_bytes)}, in {found.store}"
    )
    if found.pins:
        line += f"; {found.pins:,} pinned prefixes" if found.pins > 1 else "; 1 pinned prefix"
    elif found.pins is None:
        line += "; its list of pinned prefixes is damaged"
    if found.is_in_use:
        line += "; an engine writes it"
    if found.damaged is not None:
        line += f"; {found.damaged:,} damaged" if found.damaged else "; whole"
    return line
