"""Weights that a caller gives as tensors, in files that every rank of this host can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from quire.compute.worker.replacements import as_tensor, read_files
from quire.protocol.control import LoadWeights, Report, UpdateWeights

__all__ = ["GivenWeights"]


class GivenWeights:
    """Holds all tensors that were given so far in one file, in a folder that only this user can
    enter."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._files: tuple[str, ...] = ()
        self._num_given = 0

    def give(self, op: UpdateWeights, load: Callable[[LoadWeights], Report]) -> Report:
        """Have `load` replace weights by those of `op` and those of earlier calls. Raises what it
        raises, and the tensors are forgotten then. Raises ConfigError for a value that is no
        tensor."""
        tensors = read_files(self._files)
        tensors |= {name: as_tensor(name, value) for name, value in op.tensors.items()}
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="quire-weights-")
        path = Path(self._folder.name, f"{self._num_given}.safetensors")
        self._num_given += 1
        plain = torch.contiguous_format  # tensors may be turned, or share memory
        save_file({name: each.clone(memory_format=plain) for name, each in tensors.items()}, path)
        version = op.version or str(self._num_given)
        try:
            report = load(LoadWeights((str(path),), version))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        for old in self._files:
            Path(old).unlink(missing_ok=True)  # the ranks keep what they have mapped
        self._files = (str(path),)
        return report

    def close(self) -> None:
        """Remove the files. May be called twice."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
