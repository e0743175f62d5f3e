"""Schemes: ways in which matrices are quantized on disk, with their tensors, and the kernels that
serve them.

Each format has a folder. `scheme.py` there says what is stored, and needs no torch; `read.py` says
what the bits mean. `kernels` names the formats in which a matrix has equal weights in memory, the
best for a CPU first: formats of `quire.config.quantization`, a `BlockFormat` or a `TableFormat`.
`PackedLayout.kernel_on` chooses.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from quire.config.packed.block_kinds import BLOCK_KINDS, BlockFormat
from quire.config.packed.parts import Parts
from quire.config.packed.table_format import TableFormat
from quire.config.quantization import INT8_MAX_INPUTS, Int4Groups

__all__ = [
    "WHOLE",
    "WORD",
    "Scheme",
    "block_kernel",
    "dtype_of",
    "found",
    "int4_kernel",
    "int8_kernel",
    "num_groups",
    "table_kernels",
]

WORD = 32
"""Bits of the words into which numbers are packed."""

WHOLE = ((), (1,), (1, 1))
"""Shapes of a scale of the whole matrix."""


class Scheme(Protocol):
    """One way to hold a matrix [outputs, inputs].

    name: method, for messages.
    kinds: ends of the names of its tensors, after the module's name.
    floats: kinds of numbers that must be finite.
    dropped: ends of the names of tensors that say nothing about the weights.
    added: kinds of numbers that are added to single weights.
    settings: kinds of tensors that the host reads.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    floats: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    @property
    def rotated_inputs(self) -> int:
        """Inputs of a block that is multiplied by a Hadamard matrix; 1 for none."""
        return 1

    def rotated(self, size: int) -> Scheme | None:
        """Return the scheme with blocks of `size` inputs rotated; None if it has no such
        weights."""
        del size
        return None

    def holds(self, parts: Parts) -> bool:
        """Return whether these tensors are a matrix in this scheme, and not a plain one."""
        ...

    def measure(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs. Raises ConfigError unless all shapes and dtypes fit."""
        ...

    def kernels(self, inputs: int) -> tuple[str, ...]:
        """Names of formats with equal weights, best first."""
        ...


def dtype_of(parts: Parts, kind: str) -> str | None:
    return parts.get(kind).dtype if kind in parts else None


def num_groups(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def found(*kernels: str | None) -> tuple[str, ...]:
    """The kernels that exist, without None."""
    return tuple(kernel for kernel in kernels if kernel is not None)


def table_kernels(
    bits: int, inputs: int, block: int, *, own_tables: bool = False
) -> tuple[str, ...]:
    """Table entries with a scale for blocks of `block` inputs, the last of which may be short."""
    held = TableFormat.holding(bits, inputs, block, own_tables=own_tables)
    return () if held is None else (held.name,)


def int4_kernel(inputs: int, group_size: int, *, zero_points: bool) -> str | None:
    """The format with the largest groups that divide those of the checkpoint, whose scales are
    repeated then. It has 11 significant bits for a scale; one that needs more is found while
    loading."""
    size = inputs if group_size == -1 else group_size
    if size < inputs and inputs % size:
        return None
    held = Int4Groups(128, zero_points).holding(min(size, inputs))
    return None if held is None else held.name


def block_kernel(kind: str, inputs: int, group_size: int) -> str | None:
    """Blocks of the checkpoint's groups, as `linear_blocks` has them."""
    size = inputs if group_size == -1 or group_size > inputs else group_size
    found = BLOCK_KINDS[kind]
    if size % found.group_size or inputs % size:
        return None
    return BlockFormat(found, size).name


def int8_kernel(inputs: int) -> str | None:
    return "int8" if inputs <= INT8_MAX_INPUTS else None
