"""Choice of the format of each matrix of a model."""

from __future__ import annotations

import logging
from typing import Protocol

from quire.compute.quantization.int4 import Int4Format
from quire.compute.quantization.int8 import Int8Format
from quire.compute.quantization.plain import PlainFormat
from quire.compute.quantization.weight_format import CuttableFormat
from quire.config import MatrixShape
from quire.config.quantization import INT4_FORMATS, choose_format
from quire.ops import OpSet

__all__ = ["MatrixFormats", "QuantizedFormats"]

_log = logging.getLogger("quire.quantization")


class MatrixFormats(Protocol):
    """Decides on the format of each matrix."""

    def choose(self, shape: MatrixShape) -> CuttableFormat:
        """The format for one matrix of `shape`."""
        ...


class QuantizedFormats:
    """Formats under the setting `quantization`; None keeps every matrix in the model's dtype.

    A matrix that the format cannot hold gets another one; that is told once by its inputs.
    """

    def __init__(self, quantization: str | None, ops: OpSet) -> None:
        self._quantization = quantization
        self._plain = PlainFormat(ops)
        self._formats: dict[str, CuttableFormat] = {
            "plain": self._plain,
            "int8": Int8Format(ops),
            **{
                name: Int4Format(ops, groups.size, zero_points=groups.zero_points)
                for name, groups in INT4_FORMATS.items()
            },
        }
        self._told: set[tuple[int, str]] = set()

    @property
    def by_torch(self) -> bool:
        """True if torch multiplies some matrix, because no kernel serves the checkpoint's
        format."""
        return self._plain.by_torch

    def choose(self, shape: MatrixShape) -> CuttableFormat:
        choice = choose_format(self._quantization, shape)
        if choice.fallback is not None and (shape.inputs, choice.name) not in self._told:
            self._told.add((shape.inputs, choice.name))
            _log.warning(
                "Matrices of %d inputs are kept in %s, not in %s: %s.",
                shape.inputs,
                "the model's dtype" if choice.name == "plain" else choice.name,
                self._quantization,
                choice.fallback,
            )
        return self._formats[choice.name]
