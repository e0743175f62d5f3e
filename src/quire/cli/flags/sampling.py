"""Flags of sampling for `quire chat` and `quire complete`, with the names of the API."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.parser import CommandParser

__all__ = ["add_sampling_flags", "given_sampling"]

_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 takes the most likely token; higher is more varied"),
    ("top_p", float, "sample from the most likely tokens that hold this much probability"),
    ("top_k", int, "sample from so many of the most likely tokens"),
    ("min_p", float, "leave out tokens below this share of the most likely one's probability"),
    ("repetition_penalty", float, "above 1: what was said becomes less likely"),
    ("presence_penalty", float, "above 0: tokens of the answer become less likely"),
    ("frequency_penalty", float, "above 0: the same, by how often they came"),
    ("max_tokens", int, "longest answer"),
)


def add_sampling_flags(parser: CommandParser) -> None:
    """Those that are not given have the model's own values, or the server's."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in _NUMBERS:
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="NUMBER", help=text)
    group.add_argument("--stop", nargs="+", metavar="TEXT", help="end the answer before this")


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, by their names in the API."""
    found = {name: getattr(options, name) for name, _, _ in _NUMBERS}
    return {
        name: value for name, value in {**found, "stop": options.stop}.items() if value is not None
    }
