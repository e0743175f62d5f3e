"""`quire completion`: a script by which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]

_CHOICES = re.compile(r"\{([^{}]+)\}")
"""A metavar that lists what a flag takes."""


@dataclass(frozen=True, slots=True)
class _Flag:
    """values: values that it takes, empty if any. takes: whether it takes a value."""

    name: str
    text: str
    values: tuple[str, ...]
    takes: bool


@dataclass(frozen=True, slots=True)
class _Command:
    """words: name, such as ("bench", "serve"). kinds: words that may follow."""

    words: tuple[str, ...]
    text: str
    flags: tuple[_Flag, ...]
    kinds: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(self.words)


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("shell", choices=tuple(_SHELLS), help="of which the script is")


def run(options: argparse.Namespace) -> int:
    """Print the script, made from the flags that the commands have."""
    from quire.entrypoints.cli.main import COMMANDS, command_parsers

    found = [
        command
        for parser in command_parsers()
        for command in _commands_of(parser, COMMANDS[parser.prog.split()[1]])
    ]
    print(_SHELLS[options.shell](found))
    return 0


def _commands_of(parser: CommandParser, text: str) -> Iterator[_Command]:
    """Yield the command of a parser and its subcommands."""
    words = tuple(parser.prog.split()[1:])
    flags = [
        _Flag(flag, action.help or "", _values_of(action), action.nargs != 0)
        for flag, action in parser.shown_flags()
    ]
    kinds = parser.subcommands()
    others = (*kinds, *parser.choices_by_position())
    yield _Command(words, text, tuple(flags), others)
    for kind, (each, about) in kinds.items():
        inner = next(_commands_of(each, about))
        yield _Command((*words, kind), about, inner.flags)


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    found = _CHOICES.fullmatch(action.metavar) if isinstance(action.metavar, str) else None
    return () if found is None else tuple(found[1].split(","))


def _first(commands: list[_Command]) -> list[_Command]:
    return [command for command in commands if len(command.words) == 1]


def _values(commands: list[_Command], reply: str, files: str) -> list[str]:
    """Return the lines that complete the value of a flag. reply, files: shell code that offers
    words, and code that offers any file."""
    lines = ['  case "$name $before" in']
    for command in commands:
        chosen = [flag for flag in command.flags if flag.values]
        lines += [
            f'    "{command.name} {flag.name}") {reply.format(" ".join(flag.values))}; return;;'
            for flag in chosen
        ]
        free = [flag.name for flag in command.flags if flag.takes and not flag.values]
        if free:
            names = "|".join(f'"{command.name} {name}"' for name in free)
            lines.append(f"    {names}) {files}return;;")
    return [*lines, "  esac"]


def _words(commands: list[_Command]) -> list[str]:
    """Return the lines that set `flags` and `others` to what the command takes."""
    names = " ".join(command.name for command in _first(commands))
    lines = [
        '  local flags="--help --version" others=""',
        '  case "$name" in',
        f'    "") others="{names}";;',
    ]
    for command in commands:
        flags = " ".join(flag.name for flag in command.flags)
        lines.append(f'    "{command.name}") flags="{flags}" others="{" ".join(command.kinds)}";;')
    return [*lines, "  esac"]


def _find_command(commands: list[_Command], before: str) -> list[str]:
    """Return the lines that set `name` to the command. before: its words, to the shell."""
    names = " ".join("/".join(command.words) for command in commands)
    return [
        f'  local name="" word names=" {names} "',
        f"  for word in {before}; do",
        '    case "$names" in *" ${name:+$name/}$word "*) name="${name:+$name/}$word";; esac',
        "  done",
        '  name="${name/\\// }"',
    ]


def _bash(commands: list[_Command]) -> str:
    reply = 'COMPREPLY=($(compgen -W "{}" -- "$now"))'
    lines = [
        '# eval "$(quire completion bash)"',
        "_quire() {",
        '  local now="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        *_find_command(commands, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"'),
        "  COMPREPLY=()",
        *_values(commands, reply, ""),
        *_words(commands),
        '  [ "${now#-}" = "$now" ] && flags="$others"',
        f"  {reply.format('$flags')}",
        "}",
        "complete -o default -F _quire quire",
    ]
    return "\n".join(lines)


def _zsh(commands: list[_Command]) -> str:
    lines = [
        "#compdef quire",
        '# eval "$(quire completion zsh)", after compinit',
        "_quire() {",
        '  local now="${words[CURRENT]}" before="${words[CURRENT-1]}"',
        *_find_command(commands, '"${(@)words[2,CURRENT-1]}"'),
        *_values(commands, "compadd -- {}", "_files; "),
        *_words(commands),
        '  if [[ "$now" == -* ]]; then compadd -- ${=flags}',
        '  elif [[ -n "$others" ]]; then compadd -- ${=others}',
        "  else _files; fi",
        "}",
        "compdef _quire quire",
    ]
    return "\n".join(lines)


def _fish(commands: list[_Command]) -> str:
    lines = ["# quire completion fish | source", "complete -c quire -f"]
    for command in _first(commands):
        about = _quoted(command.text)
        lines.append(f"complete -c quire -n __fish_use_subcommand -a {command.name} -d {about}")
    for command in commands:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        for kind in command.kinds:
            others = " ".join(command.kinds)
            free = f"{seen}; and not __fish_seen_subcommand_from {others}"
            lines.append(f"complete -c quire -n {_quoted(free)} -a {kind}")
        for flag in command.flags:
            dashes = "-l" if flag.name.startswith("--") else "-s"
            dashes = "-o" if dashes == "-s" and len(flag.name) > 2 else dashes
            value = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r -F"
            lines.append(
                f"complete -c quire -n {_quoted(seen)} {dashes} {flag.name.lstrip('-')}"
                f"{value if flag.takes else ''} -d {_quoted(flag.text)}"
            )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a text between single quotes, as fish reads it."""
    plain = text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")
    return f"'{plain}'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
