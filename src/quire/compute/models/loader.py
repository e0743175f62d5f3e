"""Loads a model from a checkpoint folder into memory, tensor by tensor.

All names and shapes are checked against the files' headers before the first byte of a weight is
read, so a wrong checkpoint fails at once and not after minutes. Numbers are checked as each tensor
is read: one that is not finite would make every answer NaN.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open

from quire.base.errors import ConfigError
from quire.base.platform.streams import say
from quire.compute.layers import LayerFactory
from quire.compute.layers.weights import Cut
from quire.compute.models.causal_lm import CausalLM, HasWeights
from quire.compute.models.dummy import dummy_weights
from quire.compute.models.registry import find_model
from quire.compute.models.towers import ImageTower, find_tower
from quire.compute.models.weight_map import WeightMap, WeightTarget
from quire.compute.quantization import StoredMatrix
from quire.compute.quantization.gguf import GGUFReader
from quire.compute.quantization.mapped_file import MappedFile
from quire.config import Checkpoint, ModelSpec, TensorInfo, read_checkpoint
from quire.config.gguf import is_gguf
from quire.config.hf import StoredTensor
from quire.config.media.registry import with_tower
from quire.config.model_spec import GenericTraits
from quire.config.packed import PackedLayout

__all__ = [
    "LoadFormat",
    "check_replacements",
    "fill_model",
    "fill_with_noise",
    "match_layers",
    "load_model",
    "load_tower",
    "match_weights",
    "read_packed",
    "read_weights",
]

T = TypeVar("T")

LoadFormat = Literal["auto", "safetensors", "dummy"]

FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
MAX_NAMES = 5
OTHER_HEADS = re.compile(
    r"(?!lm_head)(\w+_heads?|scores?|classifier|qa_outputs|critic|value_model|reward_model)\."
)
"""Beginnings of names of what trainers put beside the head of a language model: value heads of
reinforcement learning, classifiers, heads that guess further tokens."""
_log = logging.getLogger("quire.models")
COMPARE_BYTES = 1 << 24
PROGRESS_LABEL = "Loading {} checkpoint shards"


def load_model(
    spec: ModelSpec,
    folder: Path,
    factory: LayerFactory,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: bool = True,
    replaced: Mapping[str, torch.Tensor] | None = None,
) -> CausalLM:
    """Build the model of `spec` and fill it.

    load_format: "auto" and "safetensors" read the folder's files; "dummy" fills with random numbers
    from `seed` and reads no weight file. progress: tell on stderr how far it has come.
    replaced: tensors to load instead (`check_replacements`), by name in the checkpoint.
    Raises ConfigError: unknown architecture or format, broken or missing file, tensors that are
    missing, unexpected, of a wrong shape, or not finite in the model's dtype.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError(f"load_format={load_format!r}: use auto, safetensors or dummy")
    if isinstance(spec.traits, GenericTraits):
        from quire.compute.models.generic import load_generic

        return load_generic(spec, folder, factory, dummy=load_format == "dummy")
    create, others = find_model(spec.architecture), replaced or {}
    if load_format == "dummy":
        model = create(spec, factory)
        fill_with_noise(model, getattr(torch, spec.dtype), seed, others)
        return model
    checkpoint = read_checkpoint(folder)
    model, plan = match_weights(spec, folder, factory, checkpoint)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    weights = read_weights(plan, checkpoint.files, dtype, progress=progress, replaced=others)
    _fill((target for _, target in plan), weights)
    return model


def fill_with_noise(
    model: HasWeights, dtype: torch.dtype, seed: int, replaced: Mapping[str, torch.Tensor]
) -> None:
    """Fill layers with random numbers. Arguments as of `load_model`."""
    targets = dict(_layer_by_layer(model.weight_map.targets(model).items()))
    named = zip(targets, dummy_weights(targets, dtype, seed), strict=True)
    weights = (
        (target, target.part_of(replaced.get(name, tensor))) for name, (target, tensor) in named
    )
    _fill(targets.values(), weights)


def fill_model(
    model: HasWeights,
    folder: Path,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    replaced: Mapping[str, torch.Tensor],
) -> None:
    """Fill layers from `checkpoint`, whose tensors are those of these layers. Other arguments and
    errors as of `load_model`."""
    plan = match_layers(model, folder, checkpoint)
    weights = read_weights(plan, checkpoint.files, dtype, progress=False, replaced=replaced)
    _fill((target for _, target in plan), weights)


def load_tower(
    spec: ModelSpec,
    folder: Path,
    factory: LayerFactory,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> ImageTower | None:
    """Build the encoder of the images of `spec` and fill it; None if it takes none. Other arguments
    and errors as of `load_model`."""
    if spec.images is None:
        return None
    tower, dtype = find_tower(spec.images, factory), getattr(torch, spec.dtype)
    targets = tower.weight_map.targets(tower)
    if load_format == "dummy":
        _fill(targets.values(), dummy_weights(targets, dtype, seed))
        return tower
    checkpoint, names = with_tower(read_checkpoint(folder), spec.images), tower.weight_map
    others = {names.canonical(name, targets): each for name, each in checkpoint.others.items()}
    missing = [name for name in targets if name not in others]
    if missing:
        raise ConfigError(
            f"{spec.images.file or folder}: {_listed(missing, 'tensor')} of the image encoder "
            "missing from the weight files. Fetch the checkpoint again, or give "
            "limit_mm_per_prompt={'image': 0}"
        )
    plan = [(_flat(others[name], target), target) for name, target in targets.items()]
    files = tuple(dict.fromkeys(tensor.file for tensor, _ in plan))
    weights = read_weights(plan, files, dtype, progress=False)
    _fill(
        targets.values(),
        (
            (target, weight.reshape(target.shape) if isinstance(weight, torch.Tensor) else weight)
            for target, weight in weights
        ),
    )
    return tower


def _flat(tensor: TensorInfo, target: WeightTarget) -> TensorInfo:
    """Return a tensor of an encoder, as a matrix if it is a convolution over patches. Raises
    ConfigError for another shape than the target's, and for numbers that are no plain floats."""
    shape = tensor.shape
    if len(shape) > 2:
        shape = (shape[0], math.prod(shape[1:]))
    if shape != target.shape:
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, but "
            f"{'config.json' if tensor.gguf is None else 'its metadata'} asks for "
            f"{list(target.shape)}; correct it, or use the matching files"
        )
    is_plain = tensor.packed is None and tensor.dtype in FLOAT_DTYPES
    if tensor.gguf is None and not is_plain:
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name!r} of the image encoder is stored as "
            f"{tensor.dtype}; use weights in one of {', '.join(FLOAT_DTYPES)}, or give "
            "limit_mm_per_prompt={'image': 0}"
        )
    return replace(tensor, shape=shape)


def match_layers(
    model: HasWeights, folder: Path, checkpoint: Checkpoint
) -> list[tuple[TensorInfo, WeightTarget]]:
    """Return what on disk goes where, for layers with the tensors of `checkpoint`. Errors as of
    `match_weights`."""
    return _match(_canonical_names(checkpoint, model), model, folder)


def match_weights(
    spec: ModelSpec, folder: Path, factory: LayerFactory, checkpoint: Checkpoint
) -> tuple[CausalLM, list[tuple[TensorInfo, WeightTarget]]]:
    """The empty model of `spec`, and what on disk goes where. Raises ConfigError unless names and
    shapes fit."""
    create = find_model(spec.architecture)
    model = create(spec, factory)
    tensors = _canonical_names(checkpoint, model)
    if spec.tie_word_embeddings and _has_own_head(tensors, model.weight_map):
        model = create(replace(spec, tie_word_embeddings=False), factory)
    return model, _match(tensors, model, folder)


def check_replacements(
    model: CausalLM, folder: Path, load_format: LoadFormat, replaced: Mapping[str, torch.Tensor]
) -> None:
    """Raise ConfigError unless these are weights of the checkpoint by name, shape and kind."""
    if load_format == "dummy":
        targets = model.weight_map.targets(model)
        shapes = {name: target.shape for name, target in targets.items()}
    else:
        shapes = {info.name: info.shape for info in read_checkpoint(folder).tensors.values()}
    for name, tensor in replaced.items():
        if name not in shapes:
            raise ConfigError(
                f"update_weights: the model has no tensor {name!r}; names are those of the "
                f"checkpoint, such as {next(iter(shapes), '')!r}"
            )
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            raise ConfigError(
                f"update_weights: tensor {name!r} has shape {list(tensor.shape)} and dtype "
                f"{tensor.dtype}; give floating-point numbers of shape {list(shapes[name])}"
            )
        if not tensor.isfinite().all():
            raise ConfigError(
                f"update_weights: tensor {name!r} holds numbers that are not finite; give it whole"
            )


def _canonical_names(checkpoint: Checkpoint, model: HasWeights) -> dict[str, TensorInfo]:
    """The checkpoint's tensors under the names that the model's map uses, without buffers."""
    names = model.weight_map
    known = {names.head: None, **dict.fromkeys(names.targets(model))}
    return {
        own_name: piece
        for name, tensor in checkpoint.tensors.items()
        if not names.is_ignored(name)
        for own_name, piece in names.pieces(names.canonical(name, known), tensor)
    }


def _has_own_head(tensors: Mapping[str, TensorInfo], names: WeightMap) -> bool:
    """Return whether a head that config.json calls tied is stored and differs from the embedding.
    Then the flag is wrong and the stored head is right, as `transformers` 5 decides too."""
    embedding, head = tensors.get(names.embedding), tensors.get(names.head)
    if embedding is None or head is None:
        return False
    if (embedding.dtype, embedding.shape) != (head.dtype, head.shape) or head.packed is not None:
        return True
    with embedding.file.open("rb") as left, head.file.open("rb") as right:
        left.seek(embedding.start)
        right.seek(head.start)
        for start in range(0, head.num_bytes, COMPARE_BYTES):
            size = min(COMPARE_BYTES, head.num_bytes - start)
            if left.read(size) != right.read(size):
                return True
    return False


def _match(
    tensors: Mapping[str, TensorInfo], model: HasWeights, folder: Path
) -> list[tuple[TensorInfo, WeightTarget]]:
    """Pairs of what is on disk and where it goes. Raises ConfigError unless they fit exactly."""
    names, targets = model.weight_map, model.weight_map.targets(model)
    found, settings = dict(tensors), "its metadata" if is_gguf(folder) else "config.json"
    if names.head not in targets:
        head = found.pop(names.head, None)
        if head is not None:
            found.setdefault(names.embedding, head)
    elsewhere = names.elsewhere(model)
    unexpected = [
        name for name in found if name not in targets and name.rpartition(".")[0] not in elsewhere
    ]
    missing = [name for name in targets if name not in found]
    if missing:
        others = (
            f" {_listed(unexpected, 'tensor')} there, but not in the model." if unexpected else ""
        )
        raise ConfigError(
            f"{folder}: {_listed(missing, 'tensor')} missing from the weight files.{others} "
            f"Fetch the checkpoint again, or correct {settings}"
        )
    heads = [name for name in unexpected if OTHER_HEADS.match(name)]
    if heads:
        _log.warning(
            "%s: %s left out: other heads on the same model, which change none of its texts",
            folder,
            _listed(heads, "tensor"),
        )
        unexpected = [name for name in unexpected if name not in heads]
    unexpected = [name for name in unexpected if not _is_empty_bias(name, found)]
    if unexpected:
        raise ConfigError(
            f"{folder}: {_listed(unexpected, 'tensor')} in the weight files, but {settings} "
            f"describes a model without; correct {settings}, or use the matching files"
        )
    for name, target in targets.items():
        tensor = found[name]
        shape = target.shape
        if tensor.packed is not None:
            shape = target.weights.stored_shape(target.part)
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, but {settings} "
                f"asks for {list(shape)}; correct {settings}, or use the matching files"
            )
        if tensor.gguf is None and tensor.packed is None and tensor.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{tensor.file}: tensor {name!r} is stored as {tensor.dtype}; "
                f"use weights in one of {', '.join(FLOAT_DTYPES)}"
            )
    return [(found[name], target) for name, target in targets.items()]


def _is_empty_bias(name: str, found: Mapping[str, TensorInfo]) -> bool:
    """Return whether the tensor is a bias of zeros beside a quantized matrix, as GPTQ's tools give
    one to each."""
    matrix, bias = found.get(f"{name.removesuffix('.bias')}.weight"), found[name]
    if not name.endswith(".bias") or matrix is None or matrix.packed is None:
        return False
    if bias.gguf is not None:
        return not GGUFReader(bias.file).numbers(bias.gguf).any()
    with safe_open(bias.file, framework="pt") as opened:
        return not _whole(bias, opened).any()


def _listed(names: Sequence[str], noun: str) -> str:
    """ "2 tensors ('a', 'b') are", with at most MAX_NAMES names."""
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES])
    more = ", ..." if len(names) > MAX_NAMES else ""
    if len(names) == 1:
        return f"1 {noun} ({shown}) is"
    return f"{len(names)} {noun}s ({shown}{more}) are"


def read_weights(
    plan: Sequence[tuple[TensorInfo, WeightTarget]],
    files: Sequence[Path],
    dtype: torch.dtype,
    *,
    progress: bool,
    replaced: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[tuple[WeightTarget, torch.Tensor | StoredMatrix]]:
    """The tensors of each file in the order of its bytes, but with all parts of a layer together,
    one at a time, mapped and not copied; of those that are cut, the part that is loaded. A plain
    one leaves memory when the next is asked for."""
    by_file: dict[Path, list[tuple[TensorInfo, WeightTarget]]] = {file: [] for file in files}
    for tensor, target in plan:
        by_file[tensor.file].append((tensor, target))
    kind = "GGUF" if any(tensor.gguf is not None for tensor, _ in plan) else "safetensors"
    for file in track(files, PROGRESS_LABEL.format(kind), shown=progress):
        if by_file[file] and by_file[file][0][0].gguf is not None:
            yield from _read_gguf(file, by_file[file], dtype, replaced)
            continue
        mapped = MappedFile(file)
        with safe_open(file, framework="pt") as opened:
            for tensor, target in _in_order(by_file[file]):
                whole, cut = replaced.get(tensor.name), target.cut
                if whole is not None and tensor.piece is not None:
                    whole = tensor.piece.of(whole)
                if whole is None and tensor.packed is not None:
                    yield target, read_packed(tensor.packed, file, opened)
                    continue
                if whole is None and tensor.piece is None:
                    numbers = mapped.numbers(tensor.start, tensor.end, FLOAT_DTYPES[tensor.dtype])
                    weight = numbers.view(tensor.shape)
                    weight = weight if cut is None else cut.of(weight)
                    _refuse_not_finite(weight, tensor, dtype, cut)
                    yield target, weight
                    mapped.release(tensor.start, tensor.end)
                    continue
                if whole is not None:
                    # In place of a quantized matrix comes one of its shape, [outputs, inputs].
                    turned = tensor.packed is not None and target.is_transposed
                    weight = target.part_of(whole.t() if turned else whole)
                else:
                    weight = _whole(tensor, opened)
                    weight = weight if cut is None else cut.of(weight)
                    _refuse_not_finite(weight, tensor, dtype)
                yield target, weight


def _in_order(
    plan: Iterable[tuple[TensorInfo, WeightTarget]],
) -> list[tuple[TensorInfo, WeightTarget]]:
    return _layer_by_layer(sorted(plan, key=lambda pair: pair[0].start))


def _layer_by_layer(pairs: Iterable[tuple[T, WeightTarget]]) -> list[tuple[T, WeightTarget]]:
    """Put the parts of each layer together, where its first one is: a layer with some of them has
    memory for all, and files may have one matrix of all experts before the next."""
    parts: dict[int, list[tuple[T, WeightTarget]]] = {}
    for pair in pairs:
        parts.setdefault(id(pair[1].weights), []).append(pair)
    return [pair for each in parts.values() for pair in each]


def read_packed(layout: PackedLayout, file: Path, opened: Any) -> StoredMatrix:
    """The tensors of one matrix, mapped. Most or all are in `file`, which is `opened`. Raises
    ConfigError for numbers that no matrix can have."""
    tensors: dict[str, torch.Tensor] = {}
    for kind, stored in layout.tensors.items():
        if stored.file == file:
            tensors[kind] = _whole(stored, opened)
            continue
        with safe_open(stored.file, framework="pt") as other:
            tensors[kind] = _whole(stored, other)
    matrix = StoredMatrix(layout, tensors)
    matrix.check()
    return matrix


def _whole(stored: StoredTensor, opened: Any) -> torch.Tensor:
    """A tensor of a file, mapped."""
    tensor = opened.get_tensor(stored.name)
    return tensor if stored.piece is None else stored.piece.of(tensor)


def _read_gguf(
    file: Path,
    plan: Iterable[tuple[TensorInfo, WeightTarget]],
    dtype: torch.dtype,
    replaced: Mapping[str, torch.Tensor],
) -> Iterator[tuple[WeightTarget, torch.Tensor | StoredMatrix]]:
    """Read weights like `read_weights`. Only some rows at a time of a tensor that is no quantized
    matrix exist in float32; one that is cut is read whole first."""
    reader = GGUFReader(file)
    for tensor, target in _in_order(plan):
        weight = replaced.get(tensor.name)
        if weight is None and tensor.gguf is not None and tensor.packed is not None:
            yield target, StoredMatrix(tensor.packed, {"blocks": reader.blocks(tensor.gguf)})
            reader.release(tensor.gguf)
            continue
        if weight is None and tensor.gguf is not None:
            weight = torch.empty(tensor.shape, dtype=dtype)
            rows = weight.view(-1, tensor.shape[-1])
            for first, numbers in reader.slices(tensor.gguf):
                _refuse_not_finite(numbers, tensor, dtype)
                rows[first : first + len(numbers)] = numbers
            reader.release(tensor.gguf)
        assert weight is not None
        yield target, target.part_of(weight)


def _refuse_not_finite(
    weight: torch.Tensor, tensor: TensorInfo, dtype: torch.dtype, cut: Cut | None = None
) -> None:
    """Raise ConfigError unless every number of `weight` is finite on disk and in `dtype`. One pass
    over memory, as fast as the copy that follows. cut: the cut that made `weight` from `tensor`."""
    extremes = torch.stack(weight.aminmax())  # NaN if any number is
    if extremes.to(dtype).isfinite().all():
        return
    broken = ~weight.isfinite()
    if broken.any():
        place = [int(i) for i in broken.nonzero()[0]]
        number = weight[tuple(place)].item()
        if cut is not None:
            place[cut.dim] = cut.index_on_disk(place[cut.dim])
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name!r} holds {number} at {place}, and "
            f"{int(broken.sum())} of its {weight.numel()} numbers are not finite; "
            "the file is damaged, or the model was saved broken: fetch the checkpoint again, or "
            "use another one"
        )
    largest = extremes[extremes.abs().argmax()]
    wider = [
        name for name in ("bfloat16", "float32") if largest.to(getattr(torch, name)).isfinite()
    ]
    advice = f"give dtype={' or '.join(map(repr, wider))}" if wider else "use another checkpoint"
    raise ConfigError(
        f"{tensor.file}: tensor {tensor.name!r} holds {largest.item():g}, which is infinite in "
        f"{str(dtype).removeprefix('torch.')}; {advice}"
    )


def _fill(
    targets: Iterable[WeightTarget],
    weights: Iterable[tuple[WeightTarget, torch.Tensor | StoredMatrix]],
) -> None:
    """Give every layer its parts, and tell it when it has them all."""
    remaining = Counter(id(target.weights) for target in targets)
    for target, weight in weights:
        if isinstance(weight, StoredMatrix):
            target.weights.load_stored(target.part, weight)
        else:
            target.weights.load(target.part, weight)
        remaining[id(target.weights)] -= 1
        if remaining[id(target.weights)] == 0:
            target.weights.finish()


def track(items: Sequence[T], label: str, *, shown: bool) -> Iterator[T]:
    """Yield the items, writing "label: 50% | 1/2 [3.1s]" to stderr as they are done: one line
    rewritten on a terminal, only the last state elsewhere."""
    started = time.monotonic()
    # pythonw has no standard error.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
    for done, item in enumerate(items):
        if shown and is_terminal:
            _write(label, done, len(items), started, "\r")
        yield item
    if shown:
        _write(label, len(items), len(items), started, "\n")


def _write(label: str, done: int, total: int, started: float, end: str) -> None:
    percent = 100 * done // max(total, 1)
    seconds = time.monotonic() - started
    say(f"{label}: {percent:3d}% | {done}/{total} [{seconds:.1f}s]{end}")
