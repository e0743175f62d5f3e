"""Layouts of quantized matrices: the tensors of a folder that form one, and its form in
memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.hf import StoredTensor
from quire.config.packed.block_kinds import BlockFormat
from quire.config.packed.format import PackedSettings
from quire.config.packed.parts import Parts
from quire.config.packed.scheme import Scheme
from quire.config.packed.table_format import TableFormat
from quire.config.quantization import matrix_bytes

__all__ = ["PackedLayout", "layouts_of"]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A matrix [outputs, inputs] in several tensors.

    tensors: tensors by the end of their name, after the module's. dropped: tensors that say nothing
    of the weights. kernels: names of formats with equal weights; see `Scheme`.
    """

    module: str
    scheme: Scheme
    outputs: int
    inputs: int
    tensors: Mapping[str, StoredTensor]
    dropped: tuple[StoredTensor, ...]
    kernels: tuple[str, ...]

    @property
    def rotation(self) -> int:
        """Inputs of a block that is rotated, as of `Scheme`."""
        return self.scheme.rotated_inputs

    @property
    def all_tensors(self) -> tuple[StoredTensor, ...]:
        return (*self.tensors.values(), *self.dropped)

    def kernel_on(self, device: str) -> str | None:
        """Return the format in which a device ("cpu" or another) keeps the matrix; None: its
        tensors stay as they are stored, and are widened some rows at a time.

        `linear_blocks` and `linear_tables` are for CPUs; a GPU has kernels for integers alone.
        """
        for kernel in self.kernels:
            if device == "cpu" or kernel.partition("-")[0] not in _CPU_KERNELS:
                return kernel
        return None

    def bytes_on(self, device: str) -> int:
        """Bytes of the matrix in memory, by `kernel_on`."""
        kernel = self.kernel_on(device)
        if kernel is None:
            return sum(tensor.num_bytes for tensor in self.tensors.values())
        if (blocks := BlockFormat.named(kernel)) is not None:
            return blocks.kind.matrix_bytes(self.outputs, self.inputs, blocks.size)
        if (tables := TableFormat.named(kernel)) is not None:
            kinds = self.tensors.keys() & set(self.scheme.added)
            added = sum(self.tensors[kind].num_elements for kind in kinds)
            return tables.matrix_bytes(self.outputs, self.inputs) + added * ADDED_BYTES
        return matrix_bytes(kernel, self.outputs, self.inputs, 0)


_CPU_KERNELS = ("blocks", "tables")
ADDED_BYTES = 8
"""Bytes of a number that is added to a weight, and of its place."""


def layouts_of(
    tensors: Mapping[str, StoredTensor], settings: PackedSettings
) -> dict[str, PackedLayout]:
    """Every quantized matrix, by the name that it would have if it were plain.

    What is stored decides: settings often list modules as left out that are not, and the other way
    round. Raises ConfigError, naming file and tensor, for a matrix that is not whole.
    """
    found: dict[str, PackedLayout] = {}
    for module, own in _by_module(tensors, settings).items():
        scheme = settings.scheme_of(module)
        kept = {kind: own[kind] for kind in scheme.kinds if kind in own}
        parts = Parts(module, kept, settings.source)
        if not kept or not scheme.holds(parts):
            continue
        outputs, inputs = scheme.measure(parts)
        found[f"{module}.weight"] = PackedLayout(
            module,
            scheme,
            outputs,
            inputs,
            kept,
            tuple(own[kind] for kind in scheme.dropped if kind in own),
            scheme.kernels(inputs),
        )
    return found


def _by_module(
    tensors: Mapping[str, StoredTensor], settings: PackedSettings
) -> dict[str, dict[str, StoredTensor]]:
    """Group tensors by module, and by the part of their name that follows it."""
    schemes = settings.schemes
    kinds = {kind for scheme in schemes for kind in (*scheme.kinds, *scheme.dropped)}
    longest_first = sorted(kinds, key=len, reverse=True)
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        kind = next((kind for kind in longest_first if name.endswith(f".{kind}")), None)
        if kind is not None:
            found.setdefault(name[: -len(kind) - 1], {})[kind] = tensor
    return found
