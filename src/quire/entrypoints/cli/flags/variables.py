"""Variables of the environment that look like quire's and set nothing: mostly misspelt flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from quire.base.foreign import nearest
from quire.config import env
from quire.entrypoints.cli.flags.layers import LayerValue
from quire.entrypoints.cli.parser import CommandParser, print_note

__all__ = ["warn_of_unknown_variables"]

_KUBERNETES = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_PORT|_PROTO|_ADDR)?$"
)
"""Variables that Kubernetes sets in every pod for a service whose name begins with quire."""


def warn_of_unknown_variables(
    parser: CommandParser, other_parsers: Callable[[], Iterable[CommandParser]]
) -> None:
    """Write a line to stderr for each variable `QUIRE_…`, and each key of the user's file, that no
    command knows. That is no error: the variables of other programs may begin alike.

    parser: parser of the command that runs. other_parsers: makes the parsers of all commands, where
    they are needed.
    """
    unknown, keys = _unknown([parser]), _unknown_keys(parser)
    if not (unknown or keys):
        return
    parsers = list(other_parsers())
    every = list(_with_subparsers(parsers))
    flags = {flag for known in every for flag in known.twins() if known.is_shown(flag)}
    shown = {env.flag_variable(flag) for flag in flags}
    for name in sorted(unknown & _unknown(parsers)):
        near = nearest(name, [*shown, *env.OWN_VARIABLES])
        advice = f"; did you mean {near}?" if near else ""
        print_note(f"warning: the variable {name} sets nothing{advice}")
    for value in keys:
        if not any(known.has_flag(value.flag) for known in every):
            near = nearest(value.flag, flags)
            advice = f"; did you mean {near.lstrip('-')}?" if near else ""
            print_note(f"warning: {value.source} sets nothing{advice}")


def _unknown_keys(parser: CommandParser) -> list[LayerValue]:
    """Return what the user's file says of flags that the running command does not have."""
    running = next((each for each in parser.with_subparsers() if any(each.twins())), None)
    if running is None:
        return []
    leaves = list(running.with_subparsers())
    found = running.users_defaults()
    return [each for each in found if not any(leaf.has_flag(each.flag) for leaf in leaves)]


def _unknown(parsers: Iterable[CommandParser]) -> set[str]:
    known = {env.flag_variable(f) for parser in _with_subparsers(parsers) for f in parser.twins()}
    return {
        name
        for name in env.quire_variables()
        if name not in known and name not in env.OWN_VARIABLES and not _KUBERNETES.search(name)
    }


def _with_subparsers(parsers: Iterable[CommandParser]) -> Iterator[CommandParser]:
    for parser in parsers:
        yield from parser.with_subparsers()
