"""Tensors in place of a checkpoint's: given by a caller, or read from files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.base.errors import ConfigError

__all__ = ["Replacements", "as_tensor", "first_sentence", "read_files"]


@dataclass(frozen=True, slots=True)
class Replacements:
    """tensors: tensors by their names in the checkpoint. files: the files that all of them came
    from; None if a caller gave some. digest: hexadecimal digest of names, dtypes, shapes and
    numbers; empty without tensors."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    files: tuple[str, ...] | None = ()
    digest: str = ""

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], files: tuple[str, ...] | None = None
    ) -> Replacements:
        """Return tensors with their digest. Reads every number once."""
        return cls(tensors, files, _digest(tensors) if tensors else "")


def read_files(paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of safetensors files, mapped; a later file wins. Raises ConfigError,
    naming the file, if one cannot be read."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                names: list[str] = opened.keys()
                found.update((name, opened.get_tensor(name)) for name in names)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(
                f"update_weights: the file {path} cannot be read ({first_sentence(error)}); give "
                "a safetensors file that every rank of the model can read"
            ) from error
    return found


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a tensor or an array of a caller as a tensor of the CPU. Raises ConfigError, naming
    it, for anything else."""
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"update_weights: tensor {name!r} cannot be read ({first_sentence(error)}); give a "
            "torch tensor or an array of numbers"
        ) from error


def first_sentence(error: BaseException) -> str:
    """Return the error without the advice on its allocator that torch adds."""
    return str(error).split(". ")[0].strip()


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.blake2b(digest_size=32, person=b"quire tensors")
    for name, tensor in sorted(tensors.items()):
        head = f"{name}\0{tensor.dtype}\0{list(tensor.shape)}".encode()
        total.update(len(head).to_bytes(8, "little") + head)
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
