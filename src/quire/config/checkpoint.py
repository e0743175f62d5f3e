"""What a checkpoint folder holds, from safetensors headers alone: no tensor is read.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, then the bytes. Headers tell the size of a model before it
is loaded, and that a file is cut off before it fails in the middle.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from quire.config.gguf import GGUFLayout, is_gguf, layout_of, read_gguf_parts
from quire.config.hf import read_json
from quire.errors import ConfigError

__all__ = ["Checkpoint", "TensorInfo", "find_weight_files", "read_checkpoint", "read_header"]

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
NOT_WEIGHTS = ("adapter_", "optimizer", "scheduler", "trainer_state")
"""Beginnings of names that trainers give to files of other things, which lie beside a model's."""
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
class TensorInfo:
    """One tensor on disk. dtype: as safetensors spells it ("BF16"), or the name of a GGUF type.
    start, end: file offsets in bytes. gguf: how a GGUF file holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    end: int
    gguf: GGUFLayout | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """files: in the order in which to read them. tensors: by name on disk. left_out: a sentence for
    each part of the folder that is not read although its name says that it is the model's."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    left_out: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Headers of all weight files of `folder`, which may be a GGUF file instead. Its tensors have
    the names of a Hugging Face folder.

    Raises ConfigError naming the file: missing, cut off, malformed, or a tensor given twice.
    """
    if is_gguf(folder):
        return _read_gguf(folder)
    index, whole = folder / INDEX_NAME, folder / WHOLE_NAME
    if not index.is_file():
        return _read_files(folder, *_files_without_index(folder))
    if not whole.is_file():
        return _read_indexed(index)
    try:
        indexed = _read_indexed(index)
    except ConfigError as error:
        return _read_whole(folder, str(error))
    if whole in indexed.files:
        return indexed
    try:
        found = _read_whole(folder, "the one file has all tensors that it names")
    except ConfigError as error:
        return replace(indexed, left_out=(str(error),))
    # Of two whole copies transformers reads the one file.
    return found if indexed.tensors.keys() <= found.tensors.keys() else indexed


def _read_whole(folder: Path, why: str) -> Checkpoint:
    """The one file beside an index that does not count."""
    found = _read_files(folder, (folder / WHOLE_NAME,), ())
    note = f"{folder}: {WHOLE_NAME} is read, and {INDEX_NAME} is left out: {why}"
    return replace(found, left_out=(note,))


def _read_indexed(index: Path) -> Checkpoint:
    """What an index names. ConfigError if something of it is missing."""
    files, weight_map = _follow_index(index)
    found = _read_files(index.parent, files, (), weight_map)
    absent = [name for name in weight_map if name not in found.tensors]
    if absent:
        raise ConfigError(
            f"{index}: tensor {absent[0]!r} is not in "
            f"{weight_map[absent[0]]}, nor are {len(absent) - 1} others where the index says; "
            "fetch the checkpoint again"
        )
    return found


def _read_files(
    folder: Path,
    files: tuple[Path, ...],
    left_out: tuple[str, ...],
    weight_map: Mapping[str, str] | None = None,
) -> Checkpoint:
    """weight_map: the file of each tensor that counts; of others all count."""
    where = weight_map or {}
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in read_header(file):
            if where.get(tensor.name, file.name) != file.name:
                continue
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ConfigError(
                    f"{folder}: tensor {tensor.name!r} is in {other.file.name} and in "
                    f"{file.name}; remove the files that do not belong to the model"
                )
    return Checkpoint(files, tensors, left_out)


def _read_gguf(file: Path) -> Checkpoint:
    tensors = {
        name: TensorInfo(
            name,
            layout.entry.shape,
            layout.entry.kind.name,
            layout.entry.file,
            layout.entry.start,
            layout.entry.end,
            layout,
        )
        for name, layout in layout_of(read_gguf_parts(file)).items()
    }
    return Checkpoint(tuple(sorted({tensor.file for tensor in tensors.values()})), tensors)


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the model, from the index if there is one.

    Raises ConfigError if there are none, or one that the index names is missing.
    """
    return read_checkpoint(folder).files


def _files_without_index(folder: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The files, and a sentence for each that is left out."""
    whole = folder / WHOLE_NAME
    if whole.is_file():
        return (whole,), ()
    # Mistral's own format puts a second copy of the same weights beside the Hugging Face one.
    found = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")
    )
    others = [path for path in found if path.name.startswith(NOT_WEIGHTS)]
    if len(found) > len(others):
        notes = (
            f"{path}: is left out, since its name says that it is no weights" for path in others
        )
        return tuple(path for path in found if path not in others), tuple(notes)
    if others:
        raise ConfigError(
            f"{folder}: has {others[0].name} alone, which is no model; give the folder of the "
            "model that it belongs to, with the weights merged into it"
        )
    legacy = sorted(path.name for path in folder.glob("*.bin"))
    if legacy:
        raise ConfigError(
            f"{folder}: has only pickled weights ({legacy[0]}), which can run code when read; "
            "convert them with transformers: save_pretrained(path, safe_serialization=True)"
        )
    raise ConfigError(
        f"{folder}: has no *.safetensors file; fetch the weights (those of a model that has "
        "only *.bin files must be converted first), or use load_format='dummy'"
    )


def _follow_index(index: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    section = read_json(index).section("weight_map")
    if section is None or not len(section):
        raise ConfigError(f"{index}: has no weight_map; fetch the file again")
    weight_map = {name: section.read(str, name) for name in section}
    files: list[Path] = []
    for name in sorted(set(weight_map.values())):
        if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map names {name!r}; expected a *.safetensors file of the folder"
            )
        file = index.parent / name
        if not file.is_file():
            raise ConfigError(f"{file}: missing, but {index.name} names it; fetch the shard again")
        files.append(file)
    return tuple(files), weight_map


def read_header(path: Path) -> tuple[TensorInfo, ...]:
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
    except ValueError as error:
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


def _read_entry(path: Path, name: str, entry: Any, body: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
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
    return TensorInfo(name, shape, dtype, path, body + start, body + end)


def _broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: broken safetensors file: {what}; fetch the file again")
