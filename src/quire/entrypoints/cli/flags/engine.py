"""A flag for every engine setting, made from the settings themselves."""

from __future__ import annotations

import argparse
from typing import Any

from quire.base.errors import ConfigError
from quire.config.foreign import ALIASES
from quire.config.settings import EngineSettings, setting_fields
from quire.entrypoints.cli.flags.fields import add_field_flags, as_flag, given_fields
from quire.entrypoints.cli.flags.foreign import add_foreign_flags, check_foreign_flags
from quire.entrypoints.cli.flags.layers import LayerValue
from quire.entrypoints.cli.parser import CommandParser

__all__ = [
    "add_engine_flags",
    "default_settings",
    "given_settings",
    "image_bounds",
    "read_settings",
    "setting_sources",
]

_PREFIX = "setting:"


def add_engine_flags(parser: CommandParser, *, server: bool = False) -> None:
    """The model as first argument or as `--model`, and `--max-model-len` and so on. server: vLLM's
    flags of a server are known too, see `quire.entrypoints.cli.flags.foreign`; add the server's own
    before."""
    group = parser.add_argument_group("engine")
    model, *others = setting_fields()
    text = model.metadata["help"]
    group.add_argument("model", nargs="?", help=text)
    group.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    spellings = {
        name: tuple(as_flag(alias) for alias, meant in ALIASES.items() if meant == name)
        for name in ALIASES.values()
    }
    spellings |= {"tensor_parallel_size": ("-tp",), "data_parallel_size": ("-dp",)}
    if server:  # elsewhere -q is --quick
        spellings["quantization"] = ("-q",)
    add_field_flags(group, others, _PREFIX, spellings)
    add_foreign_flags(parser, server=server)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name, for `EngineSettings.from_options` or `LLM`.

    Flags of vLLM that have no counterpart are accepted, so that known command lines work, and a
    line on stderr says why they are not needed; ConfigError if a feature is missing."""
    check_foreign_flags(options)
    given = given_fields(options, _PREFIX)
    if options.model is not None and options.model_flag is not None:
        raise ConfigError(
            f"The model is named twice: {options.model} and --model {options.model_flag}. "
            "Name it once."
        )
    model = options.model if options.model is not None else options.model_flag
    return given if model is None else {"model": model, **given}


def image_bounds(options: argparse.Namespace) -> tuple[int, int]:
    """Return bytes and pixels that an image has at most."""
    given = given_fields(options, _PREFIX)
    names = ("max_image_bytes", "max_image_pixels")
    chosen = EngineSettings.from_options({name: given.get(name) for name in names})
    return chosen.max_image_bytes, chosen.max_image_pixels


def default_settings(options: argparse.Namespace) -> set[str]:
    """The settings that the user's file gives, by name: no command was asked for them."""
    return {name for name, value in setting_sources(options).items() if value.is_default}


def setting_sources(options: argparse.Namespace) -> dict[str, LayerValue]:
    """The settings that the environment or a file gives, by name, with where they stand."""
    sources = {
        name.removeprefix(_PREFIX): value
        for name, value in options.sources.items()
        if name.startswith(_PREFIX)
    }
    model = options.sources.get("model_flag")
    return sources if model is None else {"model": model, **sources}


def read_settings(options: argparse.Namespace) -> EngineSettings:
    """Settings from parsed flags; the bundled model if none is named. Raises ConfigError."""
    from quire.bundled import named_model

    given = given_settings(options)
    return EngineSettings.from_options({**given, "model": named_model(given.get("model"))})
