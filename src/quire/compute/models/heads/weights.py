"""Weights of heads that guess tokens: few tensors, read whole and checked as they are taken."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quire.base.errors import ConfigError
from quire.compute.layers import WeightedLayer

__all__ = ["HeadWeights", "fill_layer", "read_head_weights"]


class HeadWeights:
    """Tensors of one file, by name. Each is taken once; tensors that are left over are an error."""

    def __init__(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._file = file
        self._left = dict(tensors)

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors that were not taken yet."""
        return self._left.keys()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in `dtype`. Raises ConfigError: missing, of another shape, or with
        numbers that are not finite in `dtype`."""
        if name not in self._left:
            raise ConfigError(
                f"{self._file}: has no tensor {name!r}; use weights that were trained for this "
                "model, in their published layout"
            )
        tensor = self._left.pop(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._file}: tensor {name!r} has shape {list(tensor.shape)}, but the model asks "
                f"for {list(shape)}; use weights that were trained for it"
            )
        found = tensor.to(dtype, copy=True)  # it is mapped
        if not found.isfinite().all():
            raise ConfigError(
                f"{self._file}: tensor {name!r} holds numbers that are not finite in {dtype}; "
                "fetch the file again"
            )
        return found

    def take_integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as int64 [...]. Raises ConfigError as `take`."""
        return self.take(name, shape, torch.int64)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; () without one."""
        tensor = self._left.get(name)
        return () if tensor is None else tuple(tensor.shape)

    def renamed(self, rename: Callable[[str], str]) -> HeadWeights:
        """The tensors that are left, by other names."""
        return HeadWeights(self._file, {rename(name): each for name, each in self._left.items()})

    def ignore(self, *names: str) -> None:
        """These are not needed here, if they are there."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Raise ConfigError if something was not taken."""
        if self._left:
            names = ", ".join(repr(name) for name in sorted(self._left)[:3])
            raise ConfigError(
                f"{self._file}: has {len(self._left)} tensors that nothing reads, such as {names}; "
                "use weights of the method that was asked for, in their published layout"
            )


def read_head_weights(file: Path) -> HeadWeights:
    """Read a safetensors file, or the plain tensors of a pickled one. Raises ConfigError if it is
    neither."""
    try:
        if file.suffix == ".safetensors":
            return HeadWeights(file, load_file(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        pickle.UnpicklingError,
        SafetensorError,
    ) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"{file}: cannot be read as tensors ({reason}); fetch it again"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in found.items()  # pyright: ignore[reportUnknownVariableType]
    ):
        raise ConfigError(f"{file}: holds something else than tensors by name; fetch it again")
    return HeadWeights(file, found)  # pyright: ignore[reportUnknownArgumentType]


def fill_layer(
    layer: WeightedLayer, weights: HeadWeights, names: Mapping[str, str], dtype: torch.dtype
) -> None:
    """Give a layer all its parts. names: names of the tensors, by part."""
    for part, shape in layer.weights.shapes().items():
        layer.weights.load(part, weights.take(names[part], shape, dtype))
    layer.weights.finish()
