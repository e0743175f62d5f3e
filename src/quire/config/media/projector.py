"""Image encoders in GGUF files of their own ("mmproj"), as llama.cpp's converter writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.config.checkpoint import TensorInfo
from quire.config.gguf import GGUFEntry, GGUFHeader, GGUFLayout, float32, read_gguf_header

__all__ = ["Projector", "ProjectorFile", "Stated", "open_projector"]

ARCHITECTURE = "clip"
_PREFIX = "clip.vision."
_TYPE = "projector_type"

_BLOCK = re.compile(r"v\.blk\.(\d{1,6})\.(\w+)")
_DEEP = re.compile(r"v\.deepstack\.(\d{1,6})\.(\w+)")
_PATCHES = "v.patch_embd.weight"
_FURTHER_FRAME = re.compile(r"v\.patch_embd\.weight\.(\d)")
_UP, _DOWN = "ffn_up", "ffn_down"


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings of a file, by their names in the files of a folder. vision: `vision_config`. more:
    other values of config.json. processor: values of preprocessor_config.json."""

    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Projector:
    """Differences between such files and the Hugging Face folders of a family.

    name: value of `clip.projector_type`.
    outer: names of tensors beside the blocks, and their names in folders.
    blocks, block: beginning of the names of a block in folders, with its index as {}, and the names
    in it. deep, deep_part: the same for what layers give to the language model.
    tokens: keys of config.json, and the texts of the tokens whose ids they are; the first text that
    the vocabulary has.
    read: reader of the metadata.
    adds_one: tensors that hold the 1 that is added to them.
    models: values of `general.architecture` of its language models; () for any.
    """

    name: str
    outer: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]
    tokens: Mapping[str, tuple[str, ...]]
    read: Callable[[ProjectorFile], Stated]
    adds_one: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    deep: str = ""
    deep_part: Mapping[str, str] = field(default_factory=dict[str, str])

    def token_ids(self, file: ProjectorFile, vocabulary: Sequence[str]) -> dict[str, int]:
        """Return the ids of `tokens` in the language model. ConfigError for one that it lacks."""
        ids = {text: index for index, text in reversed(list(enumerate(vocabulary)))}
        found: dict[str, int] = {}
        for key, texts in self.tokens.items():
            known = [ids[text] for text in texts if text in ids]
            if not known:
                raise ConfigError(
                    f"{file.path}: belongs to models with the token {texts[0]!r}, which this "
                    "model's vocabulary lacks; take the file that was published with the model"
                )
            found[key] = known[0]
        return found

    def tensors(self, file: ProjectorFile) -> dict[str, TensorInfo]:
        """Return the encoder's tensors by their names in folders. Raises ConfigError for one that
        no encoder of the family has."""
        entries = file.header.tensors
        frames = {
            int(match[1]): entry
            for name, entry in entries.items()
            if (match := _FURTHER_FRAME.fullmatch(name)) is not None
        }
        found: dict[str, TensorInfo] = {}
        for name, entry in entries.items():
            if _FURTHER_FRAME.fullmatch(name):
                continue
            stem, _, kind = name.rpartition(".")
            place = self._place(stem, file)
            if place is None or kind not in ("weight", "bias"):
                raise ConfigError(
                    f"{file.path}: tensor {name[:80]!r} is of no encoder of the type {self.name}; "
                    "convert the model again with a current llama.cpp"
                )
            layout = GGUFLayout(entry, adds_one=stem in self.adds_one)
            shape = entry.shape
            if name == _PATCHES:
                flat = _flat(entry)
                further = tuple(_flat(frames[index]) for index in sorted(frames))
                if any(each.shape != flat.shape for each in further):
                    raise ConfigError(f"{file.path}: frames of {_PATCHES} differ in their shapes")
                layout = replace(layout, entry=flat, frames=further)
                shape = (flat.shape[0], flat.shape[1] * (1 + len(further)))
            full = f"{place}.{kind}"
            found[full] = TensorInfo(
                full, shape, entry.kind.name, entry.file, entry.start, entry.end, layout
            )
        return found

    def _place(self, stem: str, file: ProjectorFile) -> str | None:
        """Return the name in folders of a layer; None for one that the family lacks."""
        block = _BLOCK.fullmatch(stem)
        if block is not None:
            part = block[2]
            if file.swaps_networks and part in (_UP, _DOWN):
                part = _DOWN if part == _UP else _UP
            name = self.block.get(part)
            return None if name is None else self.blocks.format(int(block[1])) + name
        deep = _DEEP.fullmatch(stem)
        if deep is not None:
            layers, name = file.deep_layers, self.deep_part.get(deep[2])
            if name is None or int(deep[1]) not in layers:
                return None
            return self.deep.format(layers.index(int(deep[1]))) + name
        return self.outer.get(stem)


def _flat(entry: GGUFEntry) -> GGUFEntry:
    """Return a convolution over patches as a matrix."""
    rows, *inputs = entry.shape
    return replace(entry, shape=(rows, math.prod(inputs)))


class ProjectorFile:
    """Metadata of a file with an image encoder."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    @property
    def path(self) -> Path:
        return self.header.file

    @property
    def kind(self) -> str:
        """The type of the encoder. ConfigError if the file has none for images."""
        header = self.header
        kind = header.string(f"clip.{_TYPE}") or header.string(f"{_PREFIX}{_TYPE}")
        if header.string("general.architecture") != ARCHITECTURE or kind is None:
            raise ConfigError(
                f"{self.path}: holds no image encoder; give the file with mmproj in its name that "
                "was published with the model"
            )
        return kind

    def integer(self, key: str) -> int | None:
        """Return a number under "clip.vision."; None if it is not stated."""
        return self.header.integer(_PREFIX + key)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive number, or `default`. ConfigError for another, or none at all."""
        found = self.integer(key)
        found = default if found is None else found
        if found is None or found < 1:
            raise ConfigError(
                f"{self.path}: {_PREFIX}{key} is {found} and must be a positive number; convert "
                "the model again with a current llama.cpp"
            )
        return found

    @property
    def num_blocks(self) -> int:
        """The number of blocks. ConfigError for more than the file has tensors."""
        found, most = self.size("block_count"), len(self.header.tensors)
        if found > most:
            raise ConfigError(
                f"{self.path}: {_PREFIX}block_count is {found}, but there are {most} tensors; "
                "fetch the file again"
            )
        return found

    def sizes(self, **keys: str) -> dict[str, int]:
        """Return numbers by names of config.json. keys: their names here. ConfigError as above."""
        return {name: self.size(key) for name, key in keys.items()}

    def number(self, key: str) -> float | None:
        """Return a float32 under "clip.vision." as a short decimal; None if it is not stated."""
        return float32(self.header.metadata.get(_PREFIX + key))

    def levels(self) -> dict[str, Any]:
        """Return the numbers that pixels are normed with."""
        return {
            key: [float32(each) for each in self.header.array(_PREFIX + key) or ()]
            for key in ("image_mean", "image_std")
        }

    def activation(self) -> str:
        """Return the activation by its name in config.json. ConfigError if it is another."""
        if self.header.flag("clip.use_silu"):
            return "silu"
        if self.header.flag("clip.use_gelu"):
            return "gelu_pytorch_tanh"
        raise ConfigError(
            f"{self.path}: has neither clip.use_gelu nor clip.use_silu, and quire knows no other "
            "activation of its encoders; convert the model again with a current llama.cpp"
        )

    @property
    def deep_layers(self) -> list[int]:
        """Layers that give vectors to the language model."""
        flags = self.header.array(f"{_PREFIX}is_deepstack_layers") or ()
        return [layer for layer, is_deep in enumerate(flags) if is_deep]

    @property
    def swaps_networks(self) -> bool:
        """True of files from before May 2025, whose networks have the names of their two matrices
        the other way round."""
        down = self.header.tensors.get(f"v.blk.0.{_DOWN}.weight")
        hidden, inner = self.integer("embedding_length"), self.integer("feed_forward_length")
        return down is not None and hidden != inner and down.shape == (inner, hidden)


def open_projector(
    file: Path, projectors: Mapping[str, Projector]
) -> tuple[ProjectorFile, Projector]:
    """Read the header of a file. projectors: known ones, by their names. Raises ConfigError for
    another file, and for an encoder that quire does not know."""
    opened = ProjectorFile(read_gguf_header(file))
    found = projectors.get(opened.kind)
    if found is None:
        raise ConfigError(
            f"{file}: image encoders of the type {opened.kind[:80]!r} are not supported; quire "
            f"reads {', '.join(sorted(projectors))}"
        )
    return opened, found
