"""Flags of sampling for `quire chat` and `quire complete`, with the names of the API."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from quire.entrypoints.cli.flags.fields import as_flag
from quire.entrypoints.cli.parser import CommandParser
from quire.protocol.sampling_params import SAMPLING_PARAMETERS

__all__ = ["add_sampling_flags", "chat_sampling", "given_sampling"]

_CHAT_TEMPERATURE, _CHAT_MIN_P = 0.7, 0.05
"""Defaults of chats with models that state no values of their own. The API then draws from the
whole vocabulary, which makes small models babble."""
_FILTERS = tuple(name for name, each in SAMPLING_PARAMETERS.items() if each.facts.is_filter)
_SHAPE = ("temperature", *_FILTERS)
_FLAGS = tuple(each for each in SAMPLING_PARAMETERS.values() if each.facts.has_flag)


def add_sampling_flags(parser: CommandParser) -> None:
    """Add flags of sampling. A flag that is not given has the model's own value, or the
    server's."""
    group = parser.add_argument_group("sampling")
    for each in _FLAGS:
        of_kind: dict[str, Any] = {"nargs": "+", "metavar": "TEXT"}
        if each.kind is not None:
            of_kind = {"type": each.kind, "metavar": "NUMBER"}
        group.add_argument(as_flag(each.name), help=each.facts.text, **of_kind)


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given, by their names in the API."""
    found = {each.name: getattr(options, each.name) for each in _FLAGS}
    return {name: value for name, value in found.items() if value is not None}


def chat_sampling(
    given: Mapping[str, Any], stated: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str]:
    """Return the parameters of a chat, and a line that says which of them are ours; it is empty if
    none is. stated: parameters from the model or its server; None where these are not known."""
    if stated is None or any(name in stated for name in _SHAPE):
        return dict(given), ""
    ours: dict[str, Any] = {}
    if "temperature" not in given:
        ours["temperature"] = _CHAT_TEMPERATURE
    if not any(name in given for name in _FILTERS) and given.get("temperature") != 0:
        ours["min_p"] = _CHAT_MIN_P
    shown = " and ".join(f"{as_flag(name)} {value}" for name, value in ours.items())
    note = f"the model states no sampling defaults, so the chat uses {shown}" if ours else ""
    return {**given, **ours}, note
