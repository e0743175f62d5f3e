"""An argument parser whose errors are one line and name the nearest flag, and whose flags can also
be set in the environment and in a file."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from quire.base.foreign import nearest
from quire.base.platform.streams import say
from quire.entrypoints.cli.flags.layers import (
    LayerValue,
    config_layer,
    environment_layer,
    user_layer,
)

__all__ = ["CommandParser", "print_error", "print_note"]

LAYERS_HELP = (
    "Every flag has a variable of the environment: --flag-name VALUE is QUIRE_FLAG_NAME=VALUE, a "
    "switch is true or false, and several values are separated by commas. The command line wins "
    "over the environment"
)
USERS_HELP = "; last comes the user's file, ~/.config/quire.yaml."
_MAX_IN_USAGE = 15
_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
"""Values, for argparse as for us."""
_NO_TWIN = ("--help", "--version", "--config")


class CommandParser(argparse.ArgumentParser):
    """Exits with status 2 and one line on stderr when the arguments are wrong.

    A flag that the command line leaves out takes its value from the environment, then from the file
    that `--config` names, if the command has that flag (see `add_config_flag`), then from the
    user's file of defaults. `sources` of what is parsed has these values by their `dest`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._file_owner: Callable[[], CommandParser] | None = None
        self._needs_value: set[str] = set()

    def refuse_empty(self, flag: str) -> None:
        """Make an empty value of this flag in the environment or the file an error; otherwise it
        counts as left out."""
        self._needs_value.add(flag)

    def add_config_flag(self, owner: Callable[[], CommandParser] | None = None) -> None:
        """`--config FILE`: flags as keys of a YAML file. owner: makes the parser of the command for
        which such a file is written, if it is another one: keys that only that one knows are passed
        over."""
        self._file_owner = owner
        self.add_argument("--config", metavar="FILE", help="YAML file with flags as keys")

    def has_flag(self, flag: str) -> bool:
        """Return whether the flag was added."""
        return flag in self._option_string_actions

    def with_subparsers(self) -> Iterator[CommandParser]:
        """Itself and the parsers of its subcommands."""
        yield self
        for action in self._actions:
            if isinstance(action.choices, dict):
                for parser in cast("dict[str, CommandParser]", action.choices).values():
                    yield from parser.with_subparsers()

    def shown_flags(self) -> Iterator[tuple[str, argparse.Action]]:
        """The flags that the help shows."""
        for flag, action in self._option_string_actions.items():
            if self.is_shown(flag):
                yield flag, action

    def subcommands(self) -> dict[str, tuple[CommandParser, str]]:
        """The parsers of the subcommands, with their help, by name."""
        found: dict[str, tuple[CommandParser, str]] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  it has no other name
                texts = {each.dest: each.help or "" for each in action._choices_actions}  # noqa: SLF001
                for name, parser in action.choices.items():
                    found[name] = cast(CommandParser, parser), texts.get(name, "")
        return found

    def choices_by_position(self) -> list[str]:
        """The words that may stand at the place of an argument that is no flag."""
        return [
            str(choice)
            for action in self._actions
            if not action.option_strings and not isinstance(action.choices, dict)
            for choice in action.choices or ()
        ]

    def twins(self) -> Iterator[str]:
        """The flags that have a twin in the environment."""
        for flag in self._option_string_actions:
            if flag.startswith("--") and not flag.startswith("--no-") and flag not in _NO_TWIN:
                yield flag

    def is_shown(self, flag: str) -> bool:
        """Return whether the help shows the flag."""
        return self._option_string_actions[flag].help != argparse.SUPPRESS

    def format_help(self) -> str:
        """Extend the base class's help with the other ways to set flags. The usage of a command
        with many flags does not list them twice."""
        if self.usage is None and len(self._actions) > _MAX_IN_USAGE:
            names = [f"[{action.dest}]" for action in self._actions if not action.option_strings]
            self.usage = " ".join(["%(prog)s [--flag VALUE ...]", *names])
        if self.epilog is None and any(self.twins()):
            file = ", and the environment over the file of --config"
            self.epilog = LAYERS_HELP + (file if self.has_flag("--config") else "") + USERS_HELP
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)")
        sys.exit(2)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse like the base class, with two differences. An unknown flag is an error here, where
        the command's flags are known and the nearest can be named. Flags that are not given are
        looked up in the environment and the file."""
        given = [
            self._with_dashes(str(argument))
            for argument in (sys.argv[1:] if args is None else args)
        ]
        self._refuse_unknown(given)
        parsed, rest = super().parse_known_args(given, namespace)
        for argument in rest:
            if argument.startswith("-"):
                self._refuse(argument.partition("=")[0], "no such flag")
            self.error(f"one argument too many: {argument}")
        self._fill(parsed, given)
        return parsed, rest

    def _get_option_tuples(self, option_string: str) -> Any:
        """Find the flag that an argument names in part, for the base class: none does. It joins a
        value to a one-letter flag (`-ofile`), unless the whole is a flag, here or elsewhere."""
        name, letter = option_string.partition("=")[0], option_string[:2]
        action = self._option_string_actions.get(letter)
        if action is None or action.nargs == 0 or option_string.startswith("--"):
            return []
        if self.has_flag("-" + name) or _flag_advice(name, self) is not None:
            return []
        return [each for each in super()._get_option_tuples(option_string) if each[1] == letter]

    def _with_dashes(self, argument: str) -> str:
        """`--max_model_len` is `--max-model-len`."""
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        if name.startswith("--") and not self.has_flag(name) and self.has_flag(dashed):
            return f"{dashed}{equals}{value}"
        return argument

    def _refuse_unknown(self, given: Sequence[str]) -> None:
        """End with an error for the first flag that is none, before one for what is missing. A
        command with subcommands leaves theirs to them."""
        if any(isinstance(action.choices, dict) for action in self._actions):
            return
        for argument in itertools.takewhile(lambda each: each != "--", given):
            name = argument.partition("=")[0]
            is_flag = argument[:1] == "-" and argument != "-" and " " not in argument
            if not is_flag or _NEGATIVE.match(argument) or self.has_flag(name):
                continue
            if not (self.has_flag(argument) or self._get_option_tuples(argument)):
                self._refuse(name, "no such flag")

    def _refuse(self, name: str, complaint: str) -> NoReturn:
        flags = [
            flag
            for flag in self._option_string_actions
            if flag.startswith("--") and self.is_shown(flag)
        ]
        near = nearest(name if name.startswith("--") else "-" + name, flags)
        advice = _flag_advice(name, self)
        if advice is None and near:
            advice = f"did you mean {near}?"
        elif advice is None and not name.startswith("--"):
            advice = "flags have two dashes and whole names here"
        self.error(f"{complaint}: {name}" + (f"; {advice}" if advice else ""))

    def _fill(self, parsed: argparse.Namespace, arguments: Sequence[str]) -> None:
        """Set what the command line leaves out from the environment, then from the file."""
        given = {action for argument in arguments if (action := self._named(argument)) is not None}
        given |= self._given_by_position(parsed)
        if not hasattr(parsed, "sources"):
            parsed.sources = {}
        for value in environment_layer(self.twins(), self._needs_value):
            self._fill_one(value, parsed, given)
        if self.has_flag("--config") and parsed.config is not None:
            self._fill_from_file(parsed.config, parsed, given)
        if any(self.twins()):
            for value in self.users_defaults():
                if self.has_flag(value.flag):
                    self._fill_one(value, parsed, given)

    def users_defaults(self) -> list[LayerValue]:
        """Return what the user's file says of the command, or of all. Raises ConfigError."""
        from quire.entrypoints.cli.main import COMMANDS  # which is above this module

        own = self.prog.split()[1:2]
        reads = [*own, *(["serve"] if self._file_owner is not None else [])]
        found = user_layer([name for name in reads if name in COMMANDS], COMMANDS)
        return [value for value in found if value.flag not in _NO_TWIN]

    def _fill_from_file(
        self, path: str, parsed: argparse.Namespace, given: set[argparse.Action]
    ) -> None:
        owner = self
        for value in config_layer(path):
            if value.flag not in _NO_TWIN and self.has_flag(value.flag):
                self._fill_one(value, parsed, given)
                continue
            if owner is self and self._file_owner is not None:
                owner = self._file_owner()
            if value.flag in _NO_TWIN or not owner.has_flag(value.flag):
                owner._refuse(value.flag, f"no such flag in {path}")  # noqa: SLF001  one of us

    def _fill_one(
        self, value: LayerValue, parsed: argparse.Namespace, given: set[argparse.Action]
    ) -> None:
        """given: grows by the flag that is set."""
        action = self._option_string_actions[value.flag]
        if action in given:
            return
        if value.flag in self._needs_value and value.has_gap:
            self.error(f"{value.source} is empty or has an empty part: fill it in, or leave it out")
        if value.content is None:
            return
        given.add(action)
        parsed.sources[action.dest] = value
        try:
            if action.nargs == 0:
                self._fill_switch(action, value, parsed)
            else:
                texts = value.texts() if action.nargs in ("+", "*") else [value.text()]
                setattr(parsed, action.dest, self._get_values(action, texts))
        except (argparse.ArgumentError, ValueError) as error:
            reason = error.message if isinstance(error, argparse.ArgumentError) else str(error)
            self.error(f"{value.source} cannot be {value.shown}: {reason}{value.advice}")

    def _fill_switch(
        self, action: argparse.Action, value: LayerValue, parsed: argparse.Namespace
    ) -> None:
        is_on = value.switch()
        if isinstance(action, argparse.BooleanOptionalAction):
            setattr(parsed, action.dest, is_on != value.flag.startswith("--no-"))
        elif is_on:
            setattr(parsed, action.dest, action.const)

    def _named(self, argument: str) -> argparse.Action | None:
        """The flag that an argument names, also if its value is joined to it (`-x3`, `--x=3`)."""
        if not argument.startswith("-"):
            return None
        flags = self._option_string_actions
        found = flags.get(argument.partition("=")[0])
        return found or (None if argument.startswith("--") else flags.get(argument[:2]))

    def _given_by_position(self, parsed: argparse.Namespace) -> set[argparse.Action]:
        """Flags whose value was given without a flag, such as `--model` in `quire serve NAME`."""
        names = [action.dest for action in self._actions if not action.option_strings]
        flags = ["--" + name for name in names if getattr(parsed, name, None) is not None]
        return {action for flag in flags if (action := self._named(flag)) is not None}


def _flag_advice(flag: str, parser: CommandParser) -> str | None:
    from quire.entrypoints.cli.flags.foreign import flag_advice  # which is above this module

    return flag_advice(flag, parser)


def print_error(message: str) -> None:
    """One line on stderr, in the form that all commands use."""
    say(f"quire: error: {message}\n")


def print_note(message: str) -> None:
    """One line on stderr that changes nothing."""
    say(f"quire: {message}\n")
