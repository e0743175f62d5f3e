"""The tensors that together hold one quantized matrix, checked as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.errors import ConfigError
from quire.config.hf import StoredTensor

__all__ = ["INTEGERS", "SCALES", "Parts"]

SCALES = ("F16", "BF16", "F32")
"""Dtypes of scales."""

INTEGERS = ("I32", "U32")
"""Dtypes of words that hold several numbers."""

MAX_SMALL_BYTES = 1 << 16


class Parts:
    """Tensors by the end of their name, after the module's, such as "qweight". settings: place of
    the settings that tell how to read them, for messages."""

    def __init__(self, module: str, tensors: Mapping[str, StoredTensor], settings: str) -> None:
        self.module = module
        self.tensors = tensors
        self._settings = settings

    def __contains__(self, kind: str) -> bool:
        return kind in self.tensors

    def get(self, kind: str) -> StoredTensor:
        """Raises ConfigError, naming the module and its file, if there is none."""
        found = self.tensors.get(kind)
        if found is None:
            first = next(iter(self.tensors.values()))
            raise ConfigError(
                f"{first.file}: tensor {f'{self.module}.{kind}'!r} is missing, without which "
                f"{first.name!r} cannot be read; fetch the checkpoint again, or correct "
                f"{self._settings}"
            )
        return found

    def matrix(self, kind: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """The shape of a tensor of two dimensions, neither of them empty."""
        found = self.get(kind)
        if len(found.shape) != 2 or 0 in found.shape or found.dtype not in dtypes:
            raise self.refuse(kind, f"two dimensions and dtype {' or '.join(dtypes)}")
        return found.shape[0], found.shape[1]

    def expect(self, kind: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raises ConfigError unless the tensor has this shape and one of the dtypes."""
        found = self.get(kind)
        if found.shape != shape or found.dtype not in dtypes:
            raise self.refuse(kind, f"shape {list(shape)} and dtype {' or '.join(dtypes)}")

    def refuse(self, kind: str, needs: str) -> ConfigError:
        """An error that says what the tensor is and what is needed instead."""
        found = self.get(kind)
        return ConfigError(
            f"{found.file}: tensor {found.name!r} has shape {list(found.shape)} and dtype "
            f"{found.dtype}, but {self._settings} asks for {needs}; correct it, or fetch the "
            "checkpoint again"
        )

    def read_small(self, kind: str) -> bytes:
        """The bytes of a tensor that is a setting rather than weights."""
        found = self.get(kind)
        if found.num_bytes > MAX_SMALL_BYTES:
            raise self.refuse(kind, f"at most {MAX_SMALL_BYTES} bytes")
        with found.file.open("rb") as file:
            file.seek(found.start)
            return file.read(found.num_bytes)
