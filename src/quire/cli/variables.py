"""Variables of the environment that look like quire's and set nothing: mostly misspelt flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from quire.cli.parser import CommandParser, print_note
from quire.config import env
from quire.foreign import nearest

__all__ = ["warn_of_unknown_variables"]

_KUBERNETES = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_PORT|_PROTO|_ADDR)?$"
)
"""Variables that Kubernetes sets in every pod for a service whose name begins with quire."""


def warn_of_unknown_variables(
    parser: CommandParser, other_parsers: Callable[[], Iterable[CommandParser]]
) -> None:
    """A line on stderr for each variable `QUIRE_…` that no command knows. It is no error: the
    variables of other programs may begin alike.

    parser: of the command that runs. other_parsers: of all commands; made only where it is needed.
    """
    unknown = _unknown([parser])
    if not unknown:
        return
    parsers = list(other_parsers())
    shown = {
        env.flag_variable(flag)
        for known in _with_subparsers(parsers)
        for flag in known.twins()
        if known.is_shown(flag)
    }
    for name in sorted(unknown & _unknown(parsers)):
        near = nearest(name, [*shown, *env.OWN_VARIABLES])
        advice = f"; did you mean {near}?" if near else ""
        print_note(f"warning: the variable {name} sets nothing{advice}")


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
