"""The header of a GGUF file: metadata, and the type, shape and place of each tensor.

A file is "GGUF", a version, two counts, the metadata as pairs of key and typed value, the table of
tensors, and their bytes. Nothing in it is trusted: each count and length is compared with the bytes
that are left before anything of its size is made, so a hostile file costs no more than its own
size. Long arrays, such as the tokens of a vocabulary, stay in the file until somebody asks.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.config.gguf.tensor_types import GGML_TYPES, UNSUPPORTED_TYPES, GGMLType

__all__ = [
    "GGUF_MAGIC",
    "GGUFEntry",
    "GGUFHeader",
    "float32",
    "is_gguf",
    "read_gguf_header",
    "read_gguf_parts",
]

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_KEY_BYTES = 1 << 16
MAX_PARTS = 1000
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """One tensor. shape: slowest dimension first, as everywhere else. start: file offset in
    bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    file: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _LazyArray:
    """An array that was checked and left in the file. start: file offset of its first element."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: single values by key. arrays: places of arrays by key; see `array`."""

    file: Path
    metadata: Mapping[str, Any]
    arrays: Mapping[str, _LazyArray]
    tensors: Mapping[str, GGUFEntry]

    def array(self, key: str) -> list[Any] | None:
        """The array at `key`, read from the file now; None if there is none."""
        found = self.arrays.get(key)
        if found is None:
            return None
        with _mapped(self.file) as cursor:
            cursor.position = found.start
            if found.kind == _STRING:
                return cursor.strings(found.count)
            form = f"<{found.count}{_SCALARS[found.kind]}"
            return list(struct.unpack(form, cursor.take(struct.calcsize(form))))

    def value(self, key: str) -> Any:
        """A single number; an array, one per layer, counts as its element if all are the same."""
        if key not in self.arrays:
            return self.metadata.get(key)
        values = self.array(key) or [None]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"{self.file}: {key} differs from layer to layer, which quire does not serve"
            )
        return values[0]

    def string(self, key: str) -> str | None:
        """The text at `key`, None if there is none. Raises ConfigError if it is no text."""
        return self._typed(str, "a text", key)

    def flag(self, key: str) -> bool | None:
        """True or False at `key`, None if absent. Raises ConfigError if it is neither."""
        return self._typed(bool, "true or false", key)

    def integer(self, key: str) -> int | None:
        """The number at `key`, None if absent. Raises ConfigError if it is no integer."""
        if isinstance(self.metadata.get(key), bool):
            raise self.wrong(key, "an integer")
        return self._typed(int, "an integer", key)

    def _typed(self, kind: type[Any], what: str, key: str) -> Any:
        value = self.metadata.get(key)
        if (value is None and key not in self.arrays) or isinstance(value, kind):
            return value
        raise self.wrong(key, what)

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """An error about the type of the value at `key`."""
        value = repr(self.metadata.get(key, "an array"))[:80]
        return ConfigError(f"{self.file}: {key} is {value} and must be {wanted}")


class _Cursor:
    """Reads a mapped file from front to back, never beyond its end."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data = data
        self._size = len(data)
        self.file = file
        self.position = 0

    @property
    def left(self) -> int:
        return self._size - self.position

    def take(self, count: int) -> bytes:
        """The next bytes. Raises ConfigError if the file has fewer."""
        self.skip(count)
        return self._data[self.position - count : self.position]

    def skip(self, count: int) -> None:
        if count > self.left:
            raise self.broken(f"needs {count} bytes at {self.position}, {self.left} are left")
        self.position += count

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read the number of items that follow, each of at least this many bytes."""
        count = self.number("Q")
        if count * least_bytes > self.left:
            raise self.broken(f"{count} {what} do not fit into the {self.left} bytes left")
        return count

    def string(self, limit: int | None = None) -> str:
        length = self.number("Q")
        if limit is not None and length > limit:
            raise self.broken(f"a name of {length} bytes is impossible")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"a text at {self.position - length} is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """Return the next `count` strings, which `skip_strings` has found to be there."""
        data, start, position = self._data, 0, self.position
        length = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length(data, position)[0]
                found.append(data[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self.broken(f"a text at {start} is not UTF-8") from error
        self.position = position
        return found

    def skip_strings(self, count: int) -> None:
        """Skip `count` strings at once; vocabularies have hundreds of thousands."""
        data, position, size = self._data, self.position, self._size
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > size:
                break
            position += 8 + length(data, position)[0]
            if position > size:
                break
        else:
            self.position = position
            return
        raise self.broken(f"a text of an array ends at {position}, the file at {size}")

    def broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self.file}: broken GGUF file: {what}; fetch the file again")


class _mapped:  # noqa: N801  a context manager reads like a verb
    """A cursor over a file, for as long as a with statement lasts."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> _Cursor:
        try:
            with self._file.open("rb") as opened:
                self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"{self._file}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ConfigError(f"{self._file}: is empty; fetch the file again") from error
        return _Cursor(self._data, self._file)

    def __exit__(self, *exception: object) -> None:
        self._data.close()


def float32(value: Any) -> Any:
    """Return a float32 as the shortest decimal that equals it, such as 1e-06."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def is_gguf(path: Path) -> bool:
    """Tell by its name if `path` is a file that claims to be GGUF."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def read_gguf_header(file: Path) -> GGUFHeader:
    """Metadata and tensors of one file, with every place checked against the file's size.

    Raises ConfigError: not GGUF, an unknown version, cut off, malformed, a key or tensor given
    twice, or a type that cannot be read here.
    """
    with _mapped(file) as cursor:
        if cursor.left < 4 or cursor.take(4) != GGUF_MAGIC:
            raise ConfigError(f"{file}: is no GGUF file: it does not start with 'GGUF'")
        version = cursor.number("I")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise ConfigError(f"{file}: is a big-endian GGUF file; fetch a little-endian one")
            raise ConfigError(
                f"{file}: GGUF version {version} is not supported; convert the model again with "
                "a current llama.cpp, which writes version 3"
            )
        num_tensors = cursor.count("tensors", _LEAST_TENSOR_BYTES)
        num_pairs = cursor.count("pairs of metadata", _LEAST_PAIR_BYTES)
        metadata, arrays = _read_metadata(cursor, num_pairs)
        entries = list(_read_table(cursor, num_tensors))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not _is_alignment(alignment):
            raise cursor.broken(f"general.alignment={alignment!r} is no power of two from 8 on")
        body = -(-cursor.position // alignment) * alignment
        tensors = _place(entries, body, cursor, file, alignment)
    return GGUFHeader(file, metadata, arrays, tensors)


def _is_alignment(value: int) -> bool:
    return 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def _read_metadata(cursor: _Cursor, num_pairs: int) -> tuple[dict[str, Any], dict[str, _LazyArray]]:
    metadata: dict[str, Any] = {}
    arrays: dict[str, _LazyArray] = {}
    for _ in range(num_pairs):
        key = cursor.string(MAX_KEY_BYTES)
        if key in metadata or key in arrays:
            raise cursor.broken(f"the key {key[:80]!r} is given twice")
        kind = cursor.number("I")
        if kind == _ARRAY:
            arrays[key] = _read_array(cursor, key)
        elif kind == _STRING:
            metadata[key] = cursor.string()
        elif kind in _SCALARS:
            metadata[key] = _scalar(cursor, kind)
        else:
            raise cursor.broken(f"the key {key[:80]!r} has a value of the unknown type {kind}")
    return metadata, arrays


def _scalar(cursor: _Cursor, kind: int) -> Any:
    return cursor.number("B") != 0 if kind == _BOOL else cursor.number(_SCALARS[kind])


def _read_array(cursor: _Cursor, key: str) -> _LazyArray:
    kind = cursor.number("I")
    if kind == _STRING:
        count = cursor.count("texts", 8)
        found = _LazyArray(kind, count, cursor.position)
        cursor.skip_strings(count)
        return found
    if kind not in _SCALARS:
        raise cursor.broken(f"the key {key[:80]!r} has an array of the unknown type {kind}")
    size = struct.calcsize("<" + _SCALARS[kind])
    count = cursor.count("numbers", size)
    found = _LazyArray(kind, count, cursor.position)
    cursor.skip(count * size)
    return found


def _read_table(
    cursor: _Cursor, num_tensors: int
) -> Iterator[tuple[str, tuple[int, ...], GGMLType, int]]:
    """name, shape, type and offset within the data of each tensor."""
    for _ in range(num_tensors):
        name = cursor.string(MAX_KEY_BYTES)
        num_dims = cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.broken(f"tensor {name[:80]!r} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
        number, offset = cursor.number("I"), cursor.number("Q")
        if number not in GGML_TYPES:
            raise _unknown_type(cursor, name, number)
        yield name, shape, GGML_TYPES[number], offset


def _unknown_type(cursor: _Cursor, name: str, number: int) -> ConfigError:
    if number not in UNSUPPORTED_TYPES:
        return cursor.broken(f"tensor {name[:80]!r} has the unknown type {number}")
    known = ", ".join(kind.name for kind in GGML_TYPES.values())
    return ConfigError(
        f"{cursor.file}: tensor {name[:80]!r} has the type {UNSUPPORTED_TYPES[number]}, which "
        "quire does not read; take a file of the model in another type, such as Q4_K_M or Q8_0 "
        f"(quire reads {known})"
    )


def _place(
    entries: list[tuple[str, tuple[int, ...], GGMLType, int]],
    body: int,
    cursor: _Cursor,
    file: Path,
    alignment: int,
) -> dict[str, GGUFEntry]:
    tensors: dict[str, GGUFEntry] = {}
    size = cursor.position + cursor.left
    for name, shape, kind, offset in entries:
        shown = name[:80]
        if name in tensors:
            raise cursor.broken(f"tensor {shown!r} is given twice")
        if min(shape) < 1 or shape[-1] % kind.block_size:
            raise cursor.broken(
                f"tensor {shown!r} of shape {list(shape)} is no whole number of {kind.name} "
                f"blocks of {kind.block_size}"
            )
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        start = body + offset
        if offset % alignment or start + num_bytes > size:
            raise cursor.broken(
                f"tensor {shown!r} lies at bytes {start} to {start + num_bytes}, the file ends at "
                f"{size}"
                if start + num_bytes > size
                else f"tensor {shown!r} lies at {offset}, which is no multiple of {alignment}"
            )
        tensors[name] = GGUFEntry(name, shape, kind, file, start, start + num_bytes)
    _refuse_overlaps(tensors, cursor.broken)
    return tensors


def _refuse_overlaps(
    tensors: Mapping[str, GGUFEntry], broken: Callable[[str], ConfigError]
) -> None:
    """A file of a few bytes could otherwise describe tensors that fill any memory."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda entry: entry.start):
        if tensor.start < end:
            raise broken(f"tensors {before[:80]!r} and {tensor.name[:80]!r} overlap")
        end, before = tensor.end, tensor.name


def read_gguf_parts(file: Path) -> GGUFHeader:
    """The header of `file`, with the tensors of all parts if it is one of a split model.

    Raises ConfigError as `read_gguf_header` does, and if a part is missing or not of this model.
    """
    match = _PART.fullmatch(file.name)
    if match is None:
        header = read_gguf_header(file)
        _refuse_missing_parts(header)
        return header
    num_parts = int(match["parts"])
    if not 1 <= num_parts <= MAX_PARTS:
        raise ConfigError(f"{file}: a model in {num_parts} parts is impossible; rename the file")
    files = [
        file.with_name(f"{match['stem']}-{part:05d}-of-{num_parts:05d}.gguf")
        for part in range(1, num_parts + 1)
    ]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{file}: part {missing[0]} of the model is missing; fetch all {num_parts} parts into "
            "one folder"
        )
    headers = [read_gguf_header(path) for path in files]
    tensors: dict[str, GGUFEntry] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ConfigError(
                    f"{header.file}: tensor {name[:80]!r} is also in {tensors[name].file.name}; "
                    "fetch the parts of one model"
                )
            tensors[name] = tensor
    first = headers[0]
    return GGUFHeader(first.file, first.metadata, first.arrays, tensors)


def _refuse_missing_parts(header: GGUFHeader) -> None:
    num_parts = header.integer("split.count")
    if num_parts is not None and num_parts > 1:
        raise ConfigError(
            f"{header.file}: is one of {num_parts} parts of a model; give it the name that it had, "
            f"such as model-00001-of-{num_parts:05d}.gguf, and put the others beside it"
        )
