"""`quire explain`: why a request of a running server was slow, or missed the cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from quire.cli.flags.source import DEFAULT_URL, openai_key
from quire.cli.parser import CommandParser
from quire.client import RemoteServer, ServerAddress
from quire.config import env

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("id", help="id of a request, or of its answer")
    parser.add_argument(
        "--url",
        "--base-url",
        help=f"server to ask (OPENAI_BASE_URL if that is set, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key", help="key of the server; better in QUIRE_API_KEY or OPENAI_API_KEY"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """Print the sentences. RequestError, and so status 2, for an unknown id."""
    address = ServerAddress.parse(options.url or env.openai_base_url() or DEFAULT_URL)
    server = RemoteServer(address, options.api_key or openai_key(address))
    found = server.call("GET", f"/admin/requests/{quote(options.id, safe='')}/explanation")
    print(json.dumps(found) if options.json else _text(found))
    return 0


def _text(found: Mapping[str, Any]) -> str:
    return "\n".join([*found["sentences"], *found["cache_sentences"]])
