"""Makes multiplying matrices from stored ones: by the integer kernels where these have equal
weights, else widened as they are used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.config.packed.block_kinds import BlockFormat, BlockKind
from quire.config.quantization import INT4_FORMATS
from quire.ops import OpSet, PackedMatrix
from quire.ops.linear.blocks.contract import Blocks, pack_scales
from quire.ops.linear.int4.contract import SYMMETRIC_ZERO, pack_scale
from quire.ops.linear.plain.gated import GatedMatrix
from quire.quantization.packed.integers import Integers, neighbours
from quire.quantization.packed.panels import PanelMatrix, PermutedMatrix, SideBySide
from quire.quantization.packed.stored import StoredMatrix

__all__ = ["Kept", "keep"]

_log = logging.getLogger("quire.quantization")


class Kept(NamedTuple):
    """A matrix, and whether torch multiplies any part of it, on threads of its own and with sums
    whose order may depend on the number of rows."""

    matrix: PackedMatrix
    by_torch: bool


def keep(
    ops: OpSet,
    parts: Sequence[StoredMatrix | torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gate: str | None = None,
) -> Kept:
    """One matrix of parts one below the other; plain ones [O, I] have the model's `dtype`, and
    bias [O] is of all. gate: as in `quire.ops.linear.plain`.

    Parts of one kind become one matrix of the kernel; others are multiplied one after the other.
    """
    forms = [_kernel_form(part) for part in parts]
    merged = _merge(forms)
    if merged is not None:
        return Kept(merged.pack(ops, bias, dtype, gate), by_torch=False)
    sizes = [part.shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    matrices: list[PackedMatrix] = []
    for part, form, own in zip(parts, forms, biases, strict=True):
        if isinstance(part, torch.Tensor):
            matrices.append(ops.linear(part.contiguous(), own))
        elif form is not None:
            matrices.append(form.pack(ops, own, dtype, None))
        else:
            matrices.append(PanelMatrix(part, own, dtype))
    matrix = matrices[0] if len(matrices) == 1 else SideBySide(matrices, sizes)
    if gate is not None:
        matrix = GatedMatrix(matrix, ops.activation_and_mul, gate)
    return Kept(matrix, any(isinstance(each, PanelMatrix) for each in matrices))


class _Int8(NamedTuple):
    """Arguments of `linear_int8`."""

    values: torch.Tensor
    scale: torch.Tensor

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        return ops.gated_linear("linear_int8", gate)(self.values, self.scale, bias, dtype=dtype)


class _Int4(NamedTuple):
    """Arguments of `linear_int4`, and the order of its inputs, None if they keep theirs."""

    values: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        linear = ops.gated_linear("linear_int4", gate)
        matrix = linear(self.values, self.scale, self.zeros, bias, dtype=dtype)
        return matrix if self.order is None else PermutedMatrix(matrix, self.order)


class _BlockForm(NamedTuple):
    """Arguments of `linear_blocks`, and the order of its inputs, None if they keep theirs."""

    blocks: Blocks
    order: torch.Tensor | None

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        matrix = ops.gated_linear("linear_blocks", gate)(self.blocks, bias, dtype=dtype)
        return matrix if self.order is None else PermutedMatrix(matrix, self.order)


_Form = _Int8 | _Int4 | _BlockForm


def _kernel_form(part: StoredMatrix | torch.Tensor) -> _Form | None:
    """Return what a kernel takes; None if no kernel has equal weights."""
    if isinstance(part, torch.Tensor) or part.kernel is None:
        return None
    if part.kernel == "int8":
        return _int8(part.integers())
    blocks = BlockFormat.named(part.kernel)
    if blocks is not None:
        kernel, form = "linear_blocks", _block_form(part, blocks)
    else:
        size = INT4_FORMATS[part.kernel].size
        kernel, form = "linear_int4", _int4(part.integers(), size)
    if form is None:
        _log.warning(
            "%s is widened as it is used: %s cannot hold its scales or its groups.",
            part.layout.module,
            kernel,
        )
    return form


def _block_form(part: StoredMatrix, wanted: BlockFormat) -> _BlockForm | None:
    """None unless every scale and minimum is what the kernel makes of it, and inputs of a block can
    lie together."""
    found, order = part.blocks(), None
    if found is None:
        integers = part.integers()
        if not isinstance(integers.groups, int):
            order = _order_of(integers.groups, wanted.size)
            if order is None:
                return None
            integers = integers._replace(values=integers.values[:, order])
        found = _blocks_of(integers, wanted.kind)
    scale, minimum, power = pack_scales(found)
    for half, exact in ((scale, found.scale), (minimum, found.minimum)):
        if half is None or exact is None:
            continue
        if not torch.equal(half.float() * power[:, None], exact):
            return None
    return _BlockForm(found, order)


def _blocks_of(integers: Integers, kind: BlockKind) -> Blocks:
    """Codes are never negative, so that integers from -8 or -128 on are raised."""
    values, zeros, scales, _ = integers
    raised = 0 if values.dtype == torch.uint8 else 1 << kind.bits - 1
    codes = (values.to(torch.int16) + raised).to(torch.uint8)
    if kind.offset != "zero":
        return Blocks(kind, codes, scales)
    lows = zeros if isinstance(zeros, torch.Tensor) else torch.full_like(scales, zeros)
    lows = lows.to(torch.int16) + (raised - kind.zero_code)
    return Blocks(kind, codes, scales, lows=lows.to(torch.int8))


def _order_of(groups: torch.Tensor, size: int) -> torch.Tensor | None:
    """The order of inputs in which `size` neighbours are a group, if there is one; groups [I]."""
    order = groups.argsort(stable=True)
    return order if neighbours(groups[order], size) else None


def _int8(integers: Integers) -> _Int8:
    zero = integers.zeros
    assert isinstance(zero, int)
    values = integers.values if zero == 0 else integers.values.to(torch.int16) - zero
    scale = integers.scales[:, 0].expand(len(integers.values))
    return _Int8(values.to(torch.int8), scale.contiguous())


def _int4(integers: Integers, size: int) -> _Int4 | None:
    """size: inputs of a kernel's group. None unless every scale is what the kernel makes of it, and
    inputs of a group can lie together."""
    values, zeros, scales, groups = integers
    inputs, num_groups = values.shape[1], scales.shape[1]
    order, group_size = None, inputs // num_groups
    if not isinstance(groups, int):
        order = _order_of(groups, group_size)
        if order is None:
            return None
        values = values[:, order]
    half, power = pack_scale(scales)
    if not torch.equal(half.float() * power[:, None], scales):
        return None
    if isinstance(zeros, int):
        values = (values.to(torch.int8) + (SYMMETRIC_ZERO - zeros)).to(torch.uint8)
        zeros = None
    repeats = group_size // size
    scales = scales.repeat_interleave(repeats, dim=1)
    zeros = None if zeros is None else zeros.repeat_interleave(repeats, dim=1).contiguous()
    return _Int4(values.contiguous(), scales, zeros, order)


def _merge(forms: Sequence[_Form | None]) -> _Form | None:
    """One form of all, if they are of one kind."""
    blocks = [form for form in forms if isinstance(form, _BlockForm)]
    if len(blocks) == len(forms):
        if not all(_fit_blocks(form, blocks[0]) for form in blocks):
            return None
        return _BlockForm(Blocks.joined([form.blocks for form in blocks]), blocks[0].order)
    eights = [form for form in forms if isinstance(form, _Int8)]
    if len(eights) == len(forms):
        return _Int8(
            torch.cat([form.values for form in eights]), torch.cat([form.scale for form in eights])
        )
    fours = [form for form in forms if isinstance(form, _Int4)]
    if len(fours) != len(forms) or not all(_fit(form, fours[0]) for form in fours):
        return None
    zeros = None
    if any(form.zeros is not None for form in fours):
        zeros = torch.cat(
            [
                torch.full_like(form.scale, SYMMETRIC_ZERO, dtype=torch.uint8)
                if form.zeros is None
                else form.zeros
                for form in fours
            ]
        )
    values = torch.cat([form.values for form in fours])
    return _Int4(values, torch.cat([form.scale for form in fours]), zeros, fours[0].order)


def _fit(form: _Int4, other: _Int4) -> bool:
    """Return whether both have equal groups and one order of inputs."""
    same = form.scale.shape[1] == other.scale.shape[1]
    return same and _same_order(form.order, other.order)


def _fit_blocks(form: _BlockForm, other: _BlockForm) -> bool:
    """Return whether both are of one kind, in equal blocks, with one order of inputs."""
    one, two = form.blocks, other.blocks
    same = one.kind == two.kind and one.scale.shape[1] == two.scale.shape[1]
    return same and _same_order(form.order, other.order)


def _same_order(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)
