"""Contents of a checkpoint, from the headers of its files alone: no tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from quire.base.errors import ConfigError
from quire.config.gguf import GGUFEntry, GGUFLayout, is_gguf, layout_of, read_gguf_parts
from quire.config.hf import StoredTensor, read_header, read_json
from quire.config.packed import (
    MARKS,
    GGUFBlocks,
    PackedLayout,
    is_cache_scale,
    layouts_of,
    read_packed_settings,
    split_experts,
)

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "find_weight_files",
    "name_in_text_part",
    "read_checkpoint",
    "read_header",
]

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
NOT_WEIGHTS = ("adapter_", "optimizer", "scheduler", "trainer_state")
"""Beginnings of names that trainers give to files of other things, which lie beside a model's."""

_TEXT_PART = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
"""Beginnings of the names of a text model that is one part among others."""


_OTHER_PART = re.compile(r"visual\.")
"""Beginnings of the names of other parts beside a text model whose names have no beginning."""


@dataclass(frozen=True, slots=True)
class TensorInfo(StoredTensor):
    """A tensor as a model knows it. gguf: its layout in a GGUF file. packed: its layout outside of
    GGUF files if it is quantized and stored as several tensors; then the shape is that of the
    numbers, and file, start and end are those of the first stored tensor."""

    gguf: GGUFLayout | None = None
    packed: PackedLayout | None = None

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Return the tensors that are in files."""
        return (self,) if self.packed is None else tuple(self.packed.tensors.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """files: weight files in reading order. tensors: tensors by name on disk, without the prefix of
    a text model that is a part of another model. left_out: a sentence for each part of the folder
    that is not read although its name says that it belongs to the model. cache_scales: scales of an
    8-bit KV cache, which are no weights. others: tensors beside a text model, by name on disk."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    left_out: tuple[str, ...] = ()
    cache_scales: tuple[StoredTensor, ...] = ()
    others: Mapping[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(part.num_bytes for each in self.tensors.values() for part in each.stored)

    @property
    def packed(self) -> tuple[PackedLayout, ...]:
        """Matrices that are quantized."""
        return tuple(each.packed for each in self.tensors.values() if each.packed is not None)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Headers of all weight files of `folder`, which may be a GGUF file instead. Its tensors have
    the names of a Hugging Face folder. A matrix that is quantized, in several tensors, is one
    tensor of the shape of its numbers.

    Raises ConfigError naming the file: missing, cut off, malformed, a tensor given twice, or a
    quantized matrix that is not what its settings say.
    """
    if is_gguf(folder):
        return _read_gguf(folder)
    headers = _read_headers(folder)
    stored = headers.tensors
    settings = read_packed_settings(folder)
    if settings is None:
        _refuse_packed(folder, stored)
    layouts = {} if settings is None else layouts_of(split_experts(stored), settings)
    parts = {part.name for each in layouts.values() for part in each.all_tensors}
    tensors = {name: _packed_info(name, layout) for name, layout in layouts.items()}
    scales = [each for name, each in stored.items() if is_cache_scale(name)]
    parts |= {each.name for each in scales}
    for name, each in stored.items():
        if name not in parts:
            tensors[name] = TensorInfo(
                name, each.shape, each.dtype, each.file, each.start, each.end
            )
    tensors, others = _text_part(tensors)
    return Checkpoint(headers.files, tensors, headers.left_out, tuple(scales), others)


def name_in_text_part(name: str) -> str | None:
    """Return the name that a tensor, or a module, of the text part of a model has in a model of
    text alone; None for one of another part."""
    match = _TEXT_PART.match(name)
    inner = name if match is None else name[match.end() :]
    if inner == "lm_head" or inner.startswith("lm_head."):
        return inner
    return None if match is None else f"model.{inner}"


def _text_part(
    tensors: dict[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Return the tensors of the text model in a model of several parts, by the names that they have
    in one of text alone, and the others."""
    if not any(_TEXT_PART.match(name) for name in tensors):
        others = {name: each for name, each in tensors.items() if _OTHER_PART.match(name)}
        return {name: each for name, each in tensors.items() if name not in others}, others
    found: dict[str, TensorInfo] = {}
    others: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        plain = name_in_text_part(name)
        if plain is None:
            others[name] = tensor
            continue
        if plain in found:
            raise ConfigError(
                f"{tensor.file}: tensors {found[plain].name!r} and {name!r} are the same weight; "
                "fetch the checkpoint again"
            )
        found[plain] = tensor
    return found, others


def _refuse_packed(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError for matrices whose format is not stated anywhere."""
    for name, tensor in stored.items():
        if name.endswith(MARKS):
            raise ConfigError(
                f"{tensor.file}: tensor {name!r} is part of a quantized matrix, but "
                f"{folder / 'config.json'} has no quantization_config; fetch that file again"
            )


def _packed_info(name: str, layout: PackedLayout) -> TensorInfo:
    first = next(iter(layout.tensors.values()))
    method, shape = layout.scheme.name, (layout.outputs, layout.inputs)
    return TensorInfo(name, shape, method, first.file, first.start, first.end, packed=layout)


@dataclass(frozen=True, slots=True)
class _Headers:
    """Contents of the headers of weight files, as in `Checkpoint`."""

    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    left_out: tuple[str, ...] = ()


def _read_headers(folder: Path) -> _Headers:
    """Read the headers of the files that make up the model."""
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
    # transformers reads the one file if there are two whole copies.
    return found if indexed.tensors.keys() <= found.tensors.keys() else indexed


def _read_whole(folder: Path, why: str) -> _Headers:
    """The one file beside an index that does not count."""
    found = _read_files(folder, (folder / WHOLE_NAME,), ())
    note = f"{folder}: {WHOLE_NAME} is read, and {INDEX_NAME} is left out: {why}"
    return replace(found, left_out=(note,))


def _read_indexed(index: Path) -> _Headers:
    """Read the files and tensors that an index names. ConfigError if something is missing."""
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
) -> _Headers:
    """weight_map: the file of each tensor that counts; of others all count."""
    where = weight_map or {}
    tensors: dict[str, StoredTensor] = {}
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
    return _Headers(files, tensors, left_out)


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
            _blocks_of(layout.entry),
        )
        for name, layout in layout_of(read_gguf_parts(file)).items()
    }
    return Checkpoint(tuple(sorted({tensor.file for tensor in tensors.values()})), tensors)


def _blocks_of(entry: GGUFEntry) -> PackedLayout | None:
    """A matrix of a GGUF file as it is kept in memory; None for one that is not quantized."""
    if len(entry.shape) != 2 or entry.kind.block_size == 1:
        return None
    scheme, (outputs, inputs) = GGUFBlocks(entry.kind.name), entry.shape
    stored = StoredTensor(
        entry.name, entry.shape, entry.kind.name, entry.file, entry.start, entry.end
    )
    module, kernels = entry.name.removesuffix(".weight"), scheme.kernels(inputs)
    return PackedLayout(module, scheme, outputs, inputs, {"blocks": stored}, (), kernels)


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the model, from the index if there is one.

    Raises ConfigError if there are none, or one that the index names is missing.
    """
    return read_checkpoint(folder).files if is_gguf(folder) else _read_headers(folder).files


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
