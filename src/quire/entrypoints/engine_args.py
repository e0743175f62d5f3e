"""The settings of an engine as one object, as vLLM's users pass them: `EngineArgs`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import Field, fields, make_dataclass
from dataclasses import field as dataclass_field
from typing import Any, cast

from quire.base.foreign import missing_attribute
from quire.base.idioms import MISSING_METHODS
from quire.config.foreign import ALIASES
from quire.config.settings import EngineSettings, setting_fields

__all__ = ["AsyncEngineArgs", "EngineArgs"]

_NAMES = (*(item.name for item in setting_fields()), *ALIASES)
_NUMBERS = {"int": int, "float": float}


def _options(item: Field[Any]) -> dict[str, Any]:
    """Return argparse's options for a setting."""
    kind = str(item.type).split(" | ")[0]
    common: dict[str, Any] = {"default": None, "help": item.metadata["help"].replace("%", "%%")}
    if kind == "bool":
        return {**common, "action": argparse.BooleanOptionalAction}
    if kind in _NUMBERS and "kind" not in item.metadata:
        common["type"] = _NUMBERS[kind]
    return common


class _GivenSettings:
    """Behaviour of `EngineArgs`; its fields are made from the settings."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        if model is not None:
            given["model"] = model
        EngineSettings.from_options(given)
        for name in _NAMES:
            setattr(self, name, given.get(name))

    @property
    def given(self) -> Mapping[str, Any]:
        """The settings that are not None, by name."""
        found = {item.name: getattr(self, item.name) for item in fields(cast("Any", self))}
        return {name: value for name, value in found.items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each setting; `from_cli_args` reads them."""
        by_name = {item.name: item for item in setting_fields()}
        for name in _NAMES:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, dest=name, **_options(by_name[ALIASES.get(name, name)]))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Make an instance from the attributes of `args` that are settings."""
        return cls(**{name: value for name, value in vars(args).items() if name in _NAMES})

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute("EngineArgs", name, MISSING_METHODS)


_BASE = cast(
    "type[_GivenSettings]",
    make_dataclass(
        "EngineArgs",
        [(name, Any, dataclass_field(default=None)) for name in _NAMES],
        bases=(_GivenSettings,),
        init=False,
    ),
)


class EngineArgs(_BASE):
    """Settings of `LLM` by name; None, as all are at first, leaves the choice to the engine.

    `LLM(**dataclasses.asdict(args))` and `AsyncLLM.from_engine_args(args)` start with them. Raises
    ConfigError, as `LLM` does, for a name or a value that cannot be.
    """


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM`."""
