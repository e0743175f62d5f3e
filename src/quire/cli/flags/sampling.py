"""Flags of sampling for `quire chat` and `quire complete`, with the names of the API."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.cli.parser import CommandParser

__all__ = ["add_sampling_flags", "chat_sampling", "given_sampling"]

_CHAT_TEMPERATURE, _CHAT_MIN_P = 0.7, 0.05
"""Defaults of chats with models that state no values of their own. The API then draws from the
whole vocabulary, which makes small models babble."""
_SHAPE = ("temperature", "top_p", "top_k", "min_p")

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
    """Add flags of sampling. A flag that is not given has the model's own value, or the
    server's."""
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


def chat_sampling(
    given: Mapping[str, Any], stated: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str]:
    """The parameters of a chat, and a line that says which of them are ours; it is empty if none
    is. stated: by the model or its server; None where that is not known."""
    if stated is None or any(name in stated for name in _SHAPE):
        return dict(given), ""
    ours: dict[str, Any] = {}
    if "temperature" not in given:
        ours["temperature"] = _CHAT_TEMPERATURE
    if not any(name in given for name in _SHAPE[1:]) and given.get("temperature") != 0:
        ours["min_p"] = _CHAT_MIN_P
    shown = " and ".join(f"--{name.replace('_', '-')} {value}" for name, value in ours.items())
    note = f"the model states no sampling defaults, so the chat uses {shown}" if ours else ""
    return {**given, **ours}, note
