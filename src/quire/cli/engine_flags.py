"""A flag for every engine setting, made from the settings themselves."""

from __future__ import annotations

import argparse
import sys
from dataclasses import Field
from typing import Any

from quire.cli.parser import CommandParser
from quire.config.settings import ALIASES, FOREIGN, EngineSettings, setting_fields
from quire.errors import ConfigError

__all__ = ["add_engine_flags", "given_settings", "read_settings"]

_NUMBERS = {"int": int, "float": float}
_FOREIGN_WITH_VALUE = ("swap_space", "tokenizer_mode")
_PREFIX, _FOREIGN_PREFIX = "setting:", "foreign:"


def add_engine_flags(parser: CommandParser) -> None:
    """The model as first argument or as `--model`, and `--max-model-len` and so on."""
    group = parser.add_argument_group("engine")
    for item in setting_fields():
        if item.name == "model":
            text = item.metadata["help"]
            group.add_argument("model", nargs="?", help=text)
            group.add_argument(
                "--model", dest="model_flag", metavar="MODEL", help="the same, as a flag"
            )
        else:
            _add_flag(group, item)
    for name in FOREIGN:
        parser.add_argument(
            _flag(name),
            dest=_FOREIGN_PREFIX + name,
            action="store" if name in _FOREIGN_WITH_VALUE else "store_true",
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
        )


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name, for `EngineSettings.from_options` or `LLM`.

    Flags of vLLM that have no counterpart are accepted, so that known command lines work, and a
    line on stderr says why they are not needed."""
    given: dict[str, Any] = {}
    for name, value in vars(options).items():
        if name.startswith(_PREFIX):
            given[name.removeprefix(_PREFIX)] = value
        elif name.startswith(_FOREIGN_PREFIX):
            foreign = name.removeprefix(_FOREIGN_PREFIX)
            print(f"quire: {_flag(foreign)} is not needed: {FOREIGN[foreign]}", file=sys.stderr)
    if options.model is not None and options.model_flag is not None:
        raise ConfigError(
            f"The model is named twice: {options.model} and --model {options.model_flag}. "
            "Name it once."
        )
    model = options.model if options.model is not None else options.model_flag
    return given if model is None else {"model": model, **given}


def read_settings(options: argparse.Namespace) -> EngineSettings:
    """Settings from parsed flags; the bundled model if none is named. Raises ConfigError."""
    from quire.bundled import bundled_model_path

    return EngineSettings.from_options(
        {"model": str(bundled_model_path()), **given_settings(options)}
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(group: Any, item: Field[Any]) -> None:
    rules = item.metadata
    names = [
        _flag(item.name),
        *(_flag(alias) for alias, name in ALIASES.items() if name == item.name),
    ]
    common: dict[str, Any] = {"dest": _PREFIX + item.name, "default": argparse.SUPPRESS}
    kind = str(item.type).split(" | ")[0]
    if kind == "bool":
        action = argparse.BooleanOptionalAction if item.default else "store_true"
        group.add_argument(*names, action=action, help=rules["help"], **common)
        return
    stated = "" if item.default in (None, "auto") else f" ({item.default})"
    metavar = kind.upper()
    if "choices" in rules:
        metavar = "{" + ",".join(rules["choices"]) + "}"
    elif "kind" in rules:
        metavar = "SIZE" if rules["kind"] == "bytes" else "COUNT"
    if kind in _NUMBERS and "kind" not in rules:
        common["type"] = _NUMBERS[kind]
    group.add_argument(*names, metavar=metavar, help=rules["help"] + stated, **common)
