"""Typed reading of the files of a Hugging Face folder: JSON, and the headers of safetensors files.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, then the bytes. Headers tell the size of a model before it
is loaded, and that a file is cut off before it fails in the middle.

Every value of JSON passes through `RawConfig.read`, so that a wrong type or a missing key ends as a
sentence that names the file, the key and the value, never as a KeyError deep in a layer.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from quire.base.errors import ConfigError, quoted

__all__ = ["Piece", "RawConfig", "StoredTensor", "read_header", "read_json"]

T = TypeVar("T")


class _Required:
    """The type of REQUIRED, which no JSON value can be."""


REQUIRED: Final = _Required()

_INT_BITS = 63
"""Sizes and ids with a sign fit in as many."""


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

    def overridden(self, values: Mapping[str, Any], setting: str = "hf_overrides") -> RawConfig:
        """The same with `values` of a setting in place of its own, by key."""
        if not values:
            return self
        return RawConfig({**self._data, **values}, f"{self._source} with {setting}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def has(self, key: str) -> bool:
        """Return whether `key` is present and not null."""
        return self._data.get(key) is not None

    def as_dict(self) -> dict[str, Any]:
        """A copy of the object."""
        return dict(self._data)

    def with_defaults(self, defaults: Mapping[str, Any]) -> RawConfig:
        """The same object, with what `defaults` has and it has not."""
        return RawConfig({**defaults, **self._data}, self._source)

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
        if wanted is float and not math.isfinite(value):
            raise self._type_error(key, value, "float, and finite")
        if wanted is int and isinstance(value, int) and value.bit_length() > _INT_BITS:
            raise self._type_error(key, value, f"int, of at most {_INT_BITS} bits")
        return cast(T, value)

    def _type_error(self, key: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self._source}: {key}={quoted(value)} must be of type {wanted}")


def read_json(path: Path) -> RawConfig:
    """The JSON object in `path`. Raises ConfigError if it cannot be read or is not an object."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}); the file may be cut off, fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, expected a JSON object")
    return RawConfig(cast("dict[str, Any]", data), str(path))


MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the matrices, or lists, that a tensor holds, or some of its rows: from `first` on
    `rows` of them, each `step` behind the one before. is_transposed: they are columns on disk."""

    index: int
    first: int
    rows: int
    step: int = 1
    is_transposed: bool = False

    def of(self, tensor: Any) -> Any:
        """Return the piece of the whole tensor; nothing is copied."""
        matrix = tensor[self.index]
        matrix = matrix.t() if self.is_transposed else matrix
        return matrix[self.first : self.first + self.rows * self.step : self.step]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk. dtype: name in safetensors ("BF16"), or of a GGUF type. start, end: file
    offsets in bytes. piece: part of the tensor of this name, None for all of it; for a part, shape
    and number of bytes are those of the part, and start is approximate."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    end: int
    piece: Piece | None = field(default=None, kw_only=True)

    def pieces(self, parts: int, *, interleaved: bool, is_transposed: bool) -> list[list[Self]]:
        """Split each matrix [rows, …] of [matrices, rows, …] into equal parts of the rows, which
        are neighbours, or take turns if interleaved. None is left over if rows are a multiple."""
        rows, *rest = self.shape[2:0:-1] if is_transposed else self.shape[1:]
        count = rows // parts
        shape = (count, *rest)
        size = self.num_bytes // max(self.num_elements, 1) * math.prod(shape)
        step = parts if interleaved else 1
        found: list[list[Self]] = []
        for index in range(self.shape[0]):
            own: list[Self] = []
            for part in range(parts):
                start = self.start + (index * parts + part) * size
                first = part if interleaved else part * count
                piece = Piece(index, first, count, step, is_transposed)
                own.append(replace(self, shape=shape, start=start, end=start + size, piece=piece))
            found.append(own)
        return found

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one safetensors file, checked against its size.

    Raises ConfigError with expected and actual bytes if the file is cut off or has extra bytes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length == 0 or length > MAX_HEADER_BYTES:
                raise _broken(path, f"a header of {length} bytes is impossible")
            if 8 + length > size:
                raise _broken(path, f"expected a header of {8 + length} bytes, found {size} bytes")
            header = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        entries: Any = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _broken(path, "the header is not a JSON object")
    body = 8 + length
    tensors = tuple(
        _read_entry(path, name, entry, body)
        for name, entry in cast("dict[str, Any]", entries).items()
        if name != "__metadata__"
    )
    expected = max((tensor.end for tensor in tensors), default=body)
    if expected != size:
        raise _broken(path, f"expected {expected} bytes, found {size} bytes")
    return tensors


def _read_entry(path: Path, name: str, entry: Any, body: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _broken(path, f"the header's entry for {name!r} is malformed") from error
    if dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if min(shape, default=0) < 0 or start < 0 or (end - start) * 8 != bits:
        raise _broken(
            path,
            f"tensor {name!r} of shape {list(shape)} needs {bits // 8} bytes, "
            f"the header gives it {end - start}",
        )
    return StoredTensor(name, shape, dtype, path, body + start, body + end)


def _broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: broken safetensors file: {what}; fetch the file again")
