"""`quire`: the list of commands. A command's module is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import quire
from quire.base.errors import ConfigError, QuireError, RequestError
from quire.base.foreign import nearest
from quire.base.platform.streams import claim_streams
from quire.entrypoints.cli.parser import CommandParser, print_error

__all__ = ["COMMANDS", "command_parsers", "main"]

COMMANDS: Mapping[str, str] = {
    "serve": "serve a model to OpenAI clients",
    "chat": "talk with a model, of a running server or in this process",
    "complete": "let a model continue a text, of a running server or in this process",
    "demo": "run a small model without a download: a completion and a chat answer",
    "run-batch": "answer a file of requests, without a server",
    "plan": "show what a model would use on this machine, without loading it",
    "convert": "write a checkpoint as a Hugging Face folder in 16, 8 or 4 bits",
    "cache": "show, check or clear the KV that --kv-disk keeps",
    "replay": "make the answer of a receipt again, and say whether it is the same",
    "check-model": "compare the logits of a model with those of transformers",
    "explain": "say why a request of a running server was slow or missed the cache",
    "flight": "show what an engine did before a fault or a stall, from a dump",
    "doctor": "check this machine and the kernels that it would run",
    "simulate": "serve a workload on devices that are not at hand, in simulated time",
    "bench": "measure throughput, latency, or a running server",
    "completion": "print a script by which a shell completes commands and flags",
}
"""Name and help; the module is `quire.entrypoints.cli.<name>`, with `_` for `-`."""

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Command(Protocol):
    """A module of this package."""

    def add_arguments(self, parser: CommandParser) -> None: ...

    def run(self, options: object) -> int:
        """Exit status."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (it failed), 2 (it was asked wrongly).

    An error that quire raises on purpose is one line, without a traceback.
    """
    if arguments is None:  # as a program
        claim_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except (ConfigError, RequestError) as error:
        print_error(str(error))
        return EXIT_USAGE
    except QuireError as error:
        print_error(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away; stdout must not be flushed into it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _run(given: Sequence[str]) -> int:
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    command = _load(chosen) if chosen is not None and chosen in COMMANDS else None
    parser = CommandParser(prog="quire", description="LLM inference with a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, text in COMMANDS.items():
        about = f"{text[0].upper()}{text[1:]}."
        subparser = subparsers.add_parser(name, help=text, description=about)
        if command is not None and name == chosen:
            command.add_arguments(subparser)
    _check_command(parser, given, chosen)
    options = parser.parse_args(given)
    if command is None:
        parser.print_help()
        return EXIT_USAGE
    _warn_of_unknown_variables(parser)
    return command.run(options)


def _check_command(parser: CommandParser, given: Sequence[str], chosen: str | None) -> None:
    """End with an error unless a known command comes first, or nothing but flags of `quire`."""
    if not given or given[0] in ("-h", "--help", "--version") or given[0] in COMMANDS:
        return
    if given[0].startswith("-"):
        text = " ".join(["serve", *([chosen] if chosen and chosen not in COMMANDS else [])])
        parser.error(f"no such flag: {given[0]}; begin with a command, such as `quire {text}`")
    from quire.entrypoints.cli.flags.foreign import command_advice

    near = nearest(given[0], COMMANDS)
    advice = command_advice(given[0]) or (
        f"did you mean {near}?" if near else f"it is one of {', '.join(COMMANDS)}"
    )
    parser.error(f"no such command: {given[0]}; {advice}")


def _warn_of_unknown_variables(parser: CommandParser) -> None:
    """Warn of unknown variables: a misspelt one would silently leave a default."""
    from quire.entrypoints.cli.flags.variables import warn_of_unknown_variables

    warn_of_unknown_variables(parser, command_parsers)


def command_parsers() -> Iterator[CommandParser]:
    """The parsers of all commands."""
    for name in COMMANDS:
        whole = CommandParser(prog=f"quire {name}")
        _load(name).add_arguments(whole)
        yield whole


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"quire.entrypoints.cli.{name.replace('-', '_')}"))


if __name__ == "__main__":
    sys.exit(main())
