"""Typed reading of the JSON files of a checkpoint folder.

Every value passes through `RawConfig.read`, so that a wrong type or a missing key ends as a
sentence that names the file, the key and the value, never as a KeyError deep in a layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from quire.errors import ConfigError

__all__ = ["RawConfig", "read_json"]

T = TypeVar("T")


class _Required:
    """The type of REQUIRED, which no JSON value can be."""


REQUIRED: Final = _Required()


class RawConfig:
    """A JSON object together with where it came from, for error messages.

    `null` counts as absent: Hugging Face writes it for settings that are off.
    """

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self._source = source

    @property
    def source(self) -> str:
        return self._source

    def overridden(self, values: Mapping[str, Any]) -> RawConfig:
        """The same with `values` in place of its own, by key."""
        if not values:
            return self
        return RawConfig({**self._data, **values}, f"{self._source} with hf_overrides")

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self._data.get(key) is not None

    def read(self, kind: type[T], *keys: str, default: T | _Required = REQUIRED) -> T:
        """The value of the first of `keys` that is present, or `default`.

        Raises ConfigError if no key is present and there is no default, or the type is wrong.
        """
        for key in keys:
            if self.has(key):
                return self._typed(kind, key, self._data[key])
        if isinstance(default, _Required):
            raise ConfigError(
                f"{self._source}: key {keys[0]!r} is missing; "
                f"add it with a value of type {kind.__name__}"
            )
        return default

    def read_optional(self, kind: type[T], *keys: str) -> T | None:
        """Like `read`, but None if absent or null."""
        for key in keys:
            if self.has(key):
                return self._typed(kind, key, self._data[key])
        return None

    def read_size(self, *keys: str, default: int | _Required = REQUIRED) -> int:
        """A count of at least 1. Raises ConfigError otherwise."""
        value = self.read(int, *keys, default=default)
        if value < 1:
            key = next((key for key in keys if self.has(key)), keys[0])
            raise ConfigError(f"{self._source}: {key}={value} must be at least 1")
        return value

    def read_list(self, kind: type[T], key: str) -> tuple[T, ...] | None:
        """A list whose elements are all of `kind`, as a tuple; None if absent."""
        if not self.has(key):
            return None
        value = self._data[key]
        if not isinstance(value, list):
            raise self._type_error(key, value, f"list of {kind.__name__}")
        items = cast("list[Any]", value)
        return tuple(self._typed(kind, f"{key}[{i}]", item) for i, item in enumerate(items))

    def read_ids(self, key: str) -> tuple[int, ...]:
        """Token ids written as one integer, a list, or not at all (then empty)."""
        if isinstance(self._data.get(key), list):
            return self.read_list(int, key) or ()
        value = self.read_optional(int, key)
        return () if value is None else (value,)

    def read_choice(self, choices: Collection[str], *keys: str, default: str) -> str:
        """One of `choices`. Raises ConfigError listing them for any other value."""
        value = self.read(str, *keys, default=default)
        if value not in choices:
            key = next((key for key in keys if self.has(key)), keys[0])
            raise self.unsupported(key, value, choices)
        return value

    def section(self, key: str) -> RawConfig | None:
        """The JSON object under `key`, or None if absent."""
        if not self.has(key):
            return None
        data = cast("dict[str, Any]", self._typed(dict, key, self._data[key]))
        return RawConfig(data, f"{self._source}: {key}")

    def reject(self, key: str, value: object, advice: str) -> None:
        """Raise ConfigError if `key` has `value`: the checkpoint needs what quire lacks."""
        if self._data.get(key) == value:
            raise ConfigError(f"{self._source}: {key}={value!r} is not supported; {advice}")

    def unsupported(self, key: str, value: object, supported: Collection[str]) -> ConfigError:
        """An error that names the key, its value and what may stand there."""
        names = ", ".join(repr(name) for name in sorted(supported))
        return ConfigError(f"{self._source}: {key}={value!r} is not supported; use one of {names}")

    def _typed(self, kind: type[T], key: str, value: Any) -> T:
        wanted: Any = kind
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= sys.float_info.max else value
        elif wanted is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        # bool is a subclass of int, but true is no count.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise self._type_error(key, value, kind.__name__)
        return cast(T, value)

    def _type_error(self, key: str, value: object, wanted: str) -> ConfigError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConfigError(f"{self._source}: {key}={shown} must be of type {wanted}")


def read_json(path: Path) -> RawConfig:
    """The JSON object in `path`. Raises ConfigError if it cannot be read or is not an object."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}); the file may be cut off, fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, expected a JSON object")
    return RawConfig(cast("dict[str, Any]", data), str(path))
