"""A checkpoint written anew: tensor by tensor, plain or in few bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quire.base.errors import ConfigError
from quire.compute.attention import ReferenceAttention
from quire.compute.layers import LayerFactory
from quire.compute.layers.moe import ToldFormat
from quire.compute.layers.weights import DenseWeights, PackedWeights
from quire.compute.models.causal_lm import CausalLM, HasWeights
from quire.compute.models.loader import match_weights, read_weights
from quire.compute.models.weight_map import WeightTarget
from quire.compute.quantization import PlainFormat, StoredMatrix
from quire.compute.quantization.packed.compress import compress
from quire.config import Checkpoint, MatrixShape, ModelSpec, TensorInfo, read_checkpoint
from quire.config.packed.compressed_tensors.scheme import BY_TOKEN
from quire.config.quantization import (
    INT4_FORMATS,
    choose_format,
    rotation_of,
    shared_rotation,
)
from quire.ops import OpSet

__all__ = ["Converted", "NamedFormats", "convert_weights"]

SHARD_BYTES = 4 << 30


Matched = tuple[HasWeights, list[tuple[TensorInfo, WeightTarget]]]


@dataclass(frozen=True, slots=True)
class Converted:
    """index: index of the files, None for a single file. is_tied: whether the head is the
    embedding. quantization: `quantization_config`, None if all is plain."""

    index: Mapping[str, Any] | None
    is_tied: bool
    quantization: Mapping[str, Any] | None


def convert_weights(
    spec: ModelSpec,
    folder: Path,
    out: Path,
    ops: OpSet,
    formats: NamedFormats,
    beside: Callable[[CausalLM, Checkpoint, LayerFactory], Iterable[Matched]],
) -> Converted:
    """Write the weights of the checkpoint `folder` into files of the folder `out`, in `spec.dtype`,
    and matrices in the formats of `formats` as those of compressed-tensors. beside: returns layers
    of the checkpoint that are no part of the model, and what on disk goes where in each. If `spec`
    takes images, all names stay those on disk, and what is beside the language model is copied,
    matrices of wider numbers than 16 bits in `spec.dtype`.

    Raises ConfigError as `load_model`, and for an image encoder that is quantized.
    """
    factory = LayerFactory(
        ops,
        dict.fromkeys(range(spec.num_layers), ReferenceAttention()),
        getattr(torch, spec.dtype),
        torch.device("cpu"),
        1,
        formats,
    )
    checkpoint = read_checkpoint(folder)
    model, plan = match_weights(spec, folder, factory, checkpoint)
    rename = _names_on_disk(checkpoint) if spec.images is not None else str
    plain_targets = model.weight_map.targets(model)
    targets = {rename(name): target for name, target in plain_targets.items()}
    for head, of_head in beside(model, checkpoint, factory):
        targets |= head.weight_map.targets(head)
        plan += of_head
    names = {(id(target.weights), target.part): name for name, target in targets.items()}
    chosen = {name: format_of(target) for name, target in targets.items()}
    words = any(name in INT4_FORMATS for name, _ in chosen.values())
    shards = _Shards(out)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    for target, weight in read_weights(plan, checkpoint.files, dtype, progress=False):
        name = names[id(target.weights), target.part]
        plain = _plain(target, weight, dtype)
        if chosen[name] == PLAIN:
            shards.add(name, plain)
            continue
        rows = plain.t() if target.is_transposed else plain
        module = name.removesuffix(".weight")
        own, rotation = chosen[name]
        for kind, tensor in compress(own, rows, words=words, rotation=rotation).items():
            shards.add(f"{module}.{kind}", tensor)
    copied = _copy_others(checkpoint, targets, shards, dtype) if spec.images is not None else []
    settings = quantization_config(targets, chosen, copied) if formats.quantizes else None
    is_tied = spec.has_head and model.weight_map.head not in plain_targets
    return Converted(shards.finish(), is_tied, settings)


def _names_on_disk(checkpoint: Checkpoint) -> Callable[[str], str]:
    """Return the way from a name in a model of text alone to the one that it has in `checkpoint`,
    where the text model is a part."""
    prefixes: dict[str, str] = {}
    for name, tensor in checkpoint.tensors.items():
        start = name.partition(".")[0]
        prefixes.setdefault(start, tensor.name.removesuffix(name.removeprefix(start)))

    def rename(name: str) -> str:
        start, dot, rest = name.partition(".")
        return prefixes.get(start, start) + dot + rest

    return rename


def _copy_others(
    checkpoint: Checkpoint, written: Collection[str], shards: _Shards, dtype: torch.dtype
) -> list[str]:
    """Write what is beside the language model, and return the names of its matrices' modules.
    written: names of tensors that are written already, such as those of MTP layers."""
    modules: list[str] = []
    for file in checkpoint.files:
        own = [
            tensor
            for tensor in checkpoint.others.values()
            if tensor.file == file and tensor.name not in written
        ]
        if not own:
            continue
        with safe_open(file, framework="pt") as opened:
            for tensor in sorted(own, key=lambda each: each.start):
                if tensor.packed is not None:
                    raise ConfigError(
                        f"{file}: tensor {tensor.name!r} beside the language model is quantized "
                        f"({tensor.dtype}); convert the checkpoint with an encoder in 16 bits"
                    )
                weight: torch.Tensor = opened.get_tensor(tensor.name)
                is_wide = weight.is_floating_point() and weight.element_size() > dtype.itemsize
                is_wide = is_wide and weight.dim() > 1  # norms that lack 1 have other bits rounded
                shards.add(tensor.name, weight.to(dtype) if is_wide else weight)
                if tensor.name.endswith(".weight") and weight.dim() > 1:
                    modules.append(tensor.name.removesuffix(".weight"))
    return modules


class NamedFormats:
    """`MatrixFormats` of a model that is never filled: the names of what loading it with
    `quantization` gives, but for what the arguments of `convert_model` change."""

    def __init__(
        self, ops: OpSet, quantization: str | None, *, plain_head: bool, rotate: bool
    ) -> None:
        self._ops, self._quantization = ops, quantization
        self._plain_head, self._rotate = plain_head, rotate

    @property
    def quantizes(self) -> bool:
        return self._quantization is not None

    def choose(self, shape: MatrixShape) -> NamedFormat:
        if shape.is_head and self._plain_head:
            return NamedFormat(self._ops, *PLAIN, rotate=False)
        name = choose_format(self._quantization, shape).name
        return NamedFormat(self._ops, name, rotation_of(name, shape.inputs), rotate=self._rotate)


Chosen = tuple[str, int]
"""The name of a format in `quire.config.quantization`, and the block of inputs that is rotated."""

PLAIN: Chosen = ("plain", 1)


class NamedFormat(PlainFormat):
    """name: a format of `quire.config.quantization`. rotation: inputs of a block to rotate, if
    `rotate` is set."""

    def __init__(self, ops: OpSet, name: str, rotation: int, *, rotate: bool) -> None:
        super().__init__(ops)
        self._ops, self._rotate = ops, rotate
        self.chosen: Chosen = (name, rotation if rotate else 1)

    def shared(self, inputs: int, unit: int) -> NamedFormat:
        name = self.chosen[0]
        rotation = shared_rotation(name, inputs, unit)
        return NamedFormat(self._ops, name, rotation, rotate=self._rotate)


def format_of(target: WeightTarget) -> Chosen:
    """The format that a tensor of the model gets."""
    weights = target.weights
    if not isinstance(weights, PackedWeights) or not target.part.endswith("weight"):
        return PLAIN
    found = weights.weight_format
    found = found.chosen if isinstance(found, ToldFormat) else found
    return found.chosen if isinstance(found, NamedFormat) else PLAIN


def quantization_config(
    targets: Mapping[str, WeightTarget], chosen: Mapping[str, Chosen], beside: Sequence[str] = ()
) -> dict[str, Any]:
    """`quantization_config` as compressed-tensors has it; the most common format is that of all
    linear layers, others name their modules, and so do rotations. beside: modules beside the
    model, which are plain."""
    modules: dict[str, list[str]] = {}
    rotated: dict[int, list[str]] = {}
    for name, target in targets.items():
        if isinstance(target.weights, PackedWeights) and target.part.endswith("weight"):
            own, rotation = chosen[name]
            modules.setdefault(own, []).append(name.removesuffix(".weight"))
            if rotation > 1:
                rotated.setdefault(rotation, []).append(name.removesuffix(".weight"))
    ignored = [*modules.pop("plain", []), *beside]
    words = any(name in INT4_FORMATS for name in modules)
    ordered = sorted(modules, key=lambda name: -len(modules[name]))
    groups: dict[str, Any] = {}
    for index, name in reversed(list(enumerate(ordered))):
        groups[f"group_{index}"] = {
            "targets": ["Linear"] if index == 0 else modules[name],
            "weights": _weight_settings(name),
            "input_activations": None if words else _ACTIVATIONS,
            "output_activations": None,
        }
    rotations = {f"rotation_{size}": _rotation(size, rotated[size]) for size in rotated}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if words else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "transform_config": {"config_groups": rotations} if rotations else None,
        BY_TOKEN: True,
    }


def _rotation(size: int, modules: list[str]) -> dict[str, Any]:
    """Inputs times a Hadamard matrix in blocks of `size`, and weights times its transpose."""
    sides = ({"location": "input", "inverse": False}, {"location": "weight_input", "inverse": True})
    return {
        "type": "hadamard",
        "head_dim": size,
        "randomize": False,
        "requires_grad": False,
        "apply": [{"targets": modules, **side, "ignore": []} for side in sides],
    }


_ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}


def _weight_settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"type": "int", "dynamic": False, "observer": "minmax"}
    if name == "int8":
        return settings | {"num_bits": 8, "strategy": "channel", "symmetric": True}
    groups = INT4_FORMATS[name]
    own = {"num_bits": 4, "strategy": "group", "group_size": groups.size}
    return settings | own | {"symmetric": not groups.zero_points}


def _plain(
    target: WeightTarget, weight: torch.Tensor | StoredMatrix, dtype: torch.dtype
) -> torch.Tensor:
    """Convert a weight to the tensor that `target` has on disk, in `dtype`. Two kinds keep their
    own: a norm that is stored less 1, since the sum has other bits where the rest was rounded
    before, and what the model holds in another dtype."""
    if isinstance(weight, torch.Tensor):
        dense = target.weights if isinstance(target.weights, DenseWeights) else None
        is_exact = dense is not None and (
            dense.offset(target.part) or dense.part(target.part).dtype != dtype
        )
        return weight if is_exact else weight.to(dtype)
    rows = torch.empty(weight.shape, dtype=dtype)
    for first, numbers in weight.slices():
        rows[first : first + len(numbers)] = numbers
    return rows.t() if target.is_transposed else rows


class _Shards:
    """safetensors files that are written as they fill."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._size = 0
        self._files: list[Path] = []
        self._names: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._size + tensor.nbytes > SHARD_BYTES and self._waiting:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._size += tensor.nbytes

    def finish(self) -> dict[str, Any] | None:
        """The index, if there is more than one file; all have their names then."""
        self._write()
        count = len(self._files)
        if count == 1:
            self._files[0].rename(self._folder / "model.safetensors")
            return None
        weight_map: dict[str, str] = {}
        for index, (file, names) in enumerate(zip(self._files, self._names, strict=True), 1):
            final = f"model-{index:05d}-of-{count:05d}.safetensors"
            file.rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        return {"metadata": {}, "weight_map": weight_map}

    def _write(self) -> None:
        file = self._folder / f"part-{len(self._files)}.safetensors"
        try:
            save_file(self._waiting, file, {"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(
                f"{file}: cannot be written ({error}); free some space, or name another place"
            ) from error
        self._files.append(file)
        self._names.append(list(self._waiting))
        self._waiting, self._size = {}, 0
