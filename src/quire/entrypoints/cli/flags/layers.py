"""Sources of flags beside the command line: the environment and a YAML file."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quire.base.errors import ConfigError, quoted

__all__ = ["LayerValue", "config_layer", "environment_layer", "user_layer"]

_SWITCH = {"true": True, "1": True, "yes": True, "on": True}
_SWITCH |= {"false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class LayerValue:
    """The value of one flag. source: place of the value, for errors. content: text, or a value of
    YAML: a number, a truth value, a list, a mapping (for flags that take JSON), None. is_default:
    the value comes from the user's file for all commands, and asks for nothing by itself."""

    flag: str
    source: str
    content: Any
    advice: str = ""
    is_default: bool = False

    @property
    def shown(self) -> str:
        return quoted(self.content)

    @property
    def has_gap(self) -> bool:
        """Return whether there is no value, or an empty one among several."""
        if self.content is None:
            return True
        parts = self.content if isinstance(self.content, list) else self.text().split(",")
        return not all(str(part or "").strip() for part in parts or [""])

    def text(self) -> str:
        """Return the value in its form on the command line. ValueError for a list."""
        if isinstance(self.content, dict):
            return json.dumps(self.content)
        if isinstance(self.content, list):
            raise ValueError("give one value, not a list")
        return str(self.content)

    def texts(self) -> list[str]:
        """Return the values of a flag that takes several: a list in YAML, separated by commas as
        text."""
        if isinstance(self.content, list):
            return [str(item) for item in cast("list[object]", self.content)]
        return [part.strip() for part in self.text().split(",") if part.strip()]

    def switch(self) -> bool:
        """On or off. Raises ValueError."""
        found = _SWITCH.get(str(self.content).lower())
        if found is None:
            raise ValueError("give true or false")
        return found


def environment_layer(
    flags: Iterable[str], needs_value: Container[str] = ()
) -> Iterator[LayerValue]:
    """The flags whose variables are set. needs_value: flags whose empty variables count as set."""
    names = list(flags)
    if not names:
        return
    from quire.config import env

    for flag in names:
        found = env.flag_setting(flag, may_be_empty=flag in needs_value)
        if found is not None:
            variable, value = found
            advice = ""
            if value.startswith(("tcp://", "udp://")):
                advice = "; Kubernetes sets it for a service named quire: give the flag itself"
            yield LayerValue(flag, f"the variable {variable}", value, advice)


def config_layer(path: str) -> list[LayerValue]:
    """The flags of a YAML file, whose keys may be written with or without dashes in front, and with
    dashes or underscores inside; a value that is left out is None. Raises ConfigError if it cannot
    be read or is no such file."""
    return [LayerValue(_as_flag(key), f"{key} in {path}", value) for key, value in _keys_of(path)]


def user_layer(sections: Sequence[str], commands: Container[str]) -> list[LayerValue]:
    """The flags of the user's file, those of the sections of commands first. commands: names of all
    sections. Empty if there is no file. Raises ConfigError as `config_layer`."""
    from quire.config import env

    path = env.user_config_file()
    if not os.path.isfile(path):  # unlike that of Path, it takes a folder that may not be read
        return []
    keys = dict(_keys_of(str(path)))
    found: list[LayerValue] = []
    for section in sections:
        content = keys.get(section) or {}
        if not isinstance(content, dict):
            raise ConfigError(
                f"{section} in {path} is {quoted(content)}. Write its flags below it, indented."
            )
        for key, value in cast("dict[str, Any]", content).items():
            source = f"{key} of {section} in {path}"
            found.append(LayerValue(_as_flag(str(key)), source, value, is_default=True))
    for key, value in keys.items():
        if key not in commands:
            found.append(LayerValue(_as_flag(key), f"{key} in {path}", value, is_default=True))
    return found


def _keys_of(path: str) -> list[tuple[str, Any]]:
    import yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(
            f"The file of --config cannot be read: {path} ({error.strerror}). Give another file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} is not YAML: {reason}. Write one `flag: value` a line."
        ) from error
    if content is None:
        return []
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} is not a list of flags. Write one `flag: value` a line.")
    return list(cast("dict[str, Any]", content).items())


def _as_flag(key: str) -> str:
    return "--" + key.lstrip("-").replace("_", "-")
