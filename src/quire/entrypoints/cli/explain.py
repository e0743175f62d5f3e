"""`quire explain`: why a request of a running server was slow, or missed the cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from quire.entrypoints.cli.flags.source import add_server_flags, server_of
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("id", help="id of a request, or of its answer")
    add_server_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print the sentences. RequestError, and so status 2, for an unknown id."""
    found = server_of(options).call(
        "GET", f"/admin/requests/{quote(options.id, safe='')}/explanation"
    )
    print(json.dumps(found) if options.json else _text(found))
    return 0


def _text(found: Mapping[str, Any]) -> str:
    return "\n".join([*found["sentences"], *found["cache_sentences"]])
