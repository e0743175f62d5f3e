"""Makes multiplying matrices from stored ones: integer kernels where these have equal weights, else
widened as they are used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.compute.quantization.packed.panels import PanelMatrix, PermutedMatrix, SideBySide
from quire.compute.quantization.packed.stored import StoredMatrix
from quire.config.packed.block_kinds import BlockFormat, BlockKind
from quire.config.packed.read import Integers, neighbours
from quire.config.packed.table_format import LEAST_BLOCK
from quire.config.quantization import INT4_FORMATS
from quire.ops import REFERENCE, OpSet, PackedMatrix, PartialMatrix
from quire.ops.linear.blocks.contract import Blocks, pack_scales
from quire.ops.linear.int4.contract import SYMMETRIC_ZERO, pack_scale
from quire.ops.linear.plain.gated import GatedMatrix
from quire.ops.linear.plain.partial import PlainPartial
from quire.ops.linear.tables.contract import Tables

__all__ = ["Kept", "KeptPartial", "form_of", "keep", "keep_partial"]

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
    """Return one matrix of parts one below the other; plain ones [O, I] have the model's `dtype`,
    and bias [O] is for all. gate: see `quire.ops.linear.plain`.

    Parts of one kind become one matrix of the kernel; others are multiplied one after the other.
    """
    forms = [_kernel_form(ops, part) for part in parts]
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


class KeptPartial(NamedTuple):
    """Some inputs of a matrix. by_torch: see `Kept`."""

    matrix: PartialMatrix
    by_torch: bool


def keep_partial(
    ops: OpSet, part: StoredMatrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> KeptPartial:
    """Some inputs of a matrix, which `part` has; bias [O] is of the whole.

    Where a row of activations has one scale it is that of all inputs. Scales of groups, and
    activations that are not rounded, are the same in a part.
    """
    form = _kernel_form(ops, part)
    if isinstance(form, _Int8):
        linear = ops.partial_linear("linear_int8")
        integers = linear(form.values, form.scale, bias, dtype=dtype, rotation=form.rotation)
        return KeptPartial(integers, by_torch=False)
    if isinstance(form, _Int4) and form.order is None:
        linear = ops.partial_linear("linear_int4")
        weights = (form.values, form.scale, form.zeros, bias)
        integers = linear(*weights, dtype=dtype, rotation=form.rotation)
        return KeptPartial(integers, by_torch=False)
    if form is None or (isinstance(form, _Int4) and ops.activation_bits == 8):
        return KeptPartial(PlainPartial(PanelMatrix(part, None, dtype), bias), by_torch=True)
    return KeptPartial(PlainPartial(form.pack(ops, None, dtype, None), bias), by_torch=False)


class _Int8(NamedTuple):
    """Arguments of `linear_int8`."""

    values: torch.Tensor
    scale: torch.Tensor
    rotation: int = 1

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        linear = ops.gated_linear("linear_int8", gate)
        return linear(self.values, self.scale, bias, dtype=dtype, rotation=self.rotation)


class _Int4(NamedTuple):
    """Arguments of `linear_int4`, and the order of its inputs, None if they keep theirs."""

    values: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    rotation: int = 1

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        linear = ops.gated_linear("linear_int4", gate)
        weights = (self.values, self.scale, self.zeros, bias)
        matrix = linear(*weights, dtype=dtype, rotation=self.rotation)
        return _permuted(ops, matrix, self.order)


class _BlockForm(NamedTuple):
    """Arguments of `linear_blocks`, and the order of its inputs, None if they keep theirs."""

    blocks: Blocks
    order: torch.Tensor | None

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        matrix = ops.gated_linear("linear_blocks", gate)(self.blocks, bias, dtype=dtype)
        return _permuted(ops, matrix, self.order)


class _TableForm(NamedTuple):
    """Arguments of `linear_tables`."""

    tables: Tables

    def pack(
        self, ops: OpSet, bias: torch.Tensor | None, dtype: torch.dtype, gate: str | None
    ) -> PackedMatrix:
        return ops.gated_linear("linear_tables", gate)(self.tables, bias, dtype=dtype)


_Form = _Int8 | _Int4 | _BlockForm | _TableForm


def _permuted(ops: OpSet, matrix: PackedMatrix, order: torch.Tensor | None) -> PackedMatrix:
    return matrix if order is None else PermutedMatrix(matrix, order, ops.take_columns)


def _kernel_form(ops: OpSet, part: StoredMatrix | torch.Tensor) -> _Form | None:
    """Return what a kernel takes; None if no kernel has equal weights. References of products of
    floats have them all in the model's dtype, so that a `PanelMatrix` takes their place."""
    kernel = None if isinstance(part, torch.Tensor) else part.kernel
    if kernel is None or isinstance(part, torch.Tensor):
        return None
    operation = f"linear_{kernel.partition('-')[0]}"
    is_of_floats = operation == "linear_tables" or ops.activation_bits == 16
    if is_of_floats and ops.chosen[operation] == REFERENCE:
        return None
    form = form_of(part.defined(), kernel)
    if form is None:
        _log.warning(
            "%s is widened as it is used: %s cannot hold its scales or its groups.",
            part.layout.module,
            operation,
        )
    return _rotated(form, part.layout.rotation)


def _rotated(form: _Form | None, rotation: int) -> _Form | None:
    """The same for rotated inputs; None if they are in another order."""
    if rotation == 1 or form is None:
        return form
    if isinstance(form, _Int4) and form.order is None:
        return form._replace(rotation=rotation)
    return form._replace(rotation=rotation) if isinstance(form, _Int8) else None


def form_of(found: Blocks | Integers | Tables, kernel: str) -> _Form | None:
    """Return the weights in the form of a kernel; None if it cannot hold them. kernel: its name in
    `PackedLayout`."""
    if isinstance(found, Tables):
        size, inputs = found.block_size, found.codes.shape[1]
        fits = size % 4 == 0 and (size >= LEAST_BLOCK or size == inputs)
        return _TableForm(found) if fits else None
    blocks = BlockFormat.named(kernel)
    if blocks is not None:
        return _block_form(found, blocks)
    integers = _integers_of(found) if isinstance(found, Blocks) else found
    return _int8(integers) if kernel == "int8" else _int4(integers, INT4_FORMATS[kernel].size)


def _integers_of(blocks: Blocks) -> Integers:
    """The same weights, of a kind that has neither levels nor factors nor offsets."""
    size = blocks.codes.shape[1] // blocks.scale.shape[1]
    return Integers(blocks.codes, blocks.kind.zero_code, blocks.scale, size)


def _block_form(found: Blocks | Integers, wanted: BlockFormat) -> _BlockForm | None:
    """None unless every scale and minimum is what the kernel makes of it, and inputs of a block can
    lie together."""
    order = None
    if isinstance(found, Integers):
        if not isinstance(found.groups, int):
            order = _order_of(found.groups, wanted.size)
            if order is None:
                return None
            found = found._replace(values=found.values[:, order])
        found = _blocks_of(found, wanted.kind)
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
    tables = [form.tables for form in forms if isinstance(form, _TableForm)]
    if len(tables) == len(forms):
        fit = all(_fit_tables(each, tables[0]) for each in tables)
        return _TableForm(Tables.joined(tables)) if fit else None
    blocks = [form for form in forms if isinstance(form, _BlockForm)]
    if len(blocks) == len(forms):
        if not all(_fit_blocks(form, blocks[0]) for form in blocks):
            return None
        return _BlockForm(Blocks.joined([form.blocks for form in blocks]), blocks[0].order)
    eights = [form for form in forms if isinstance(form, _Int8)]
    if len(eights) == len(forms):
        rotation = eights[0].rotation
        if any(form.rotation != rotation for form in eights):
            return None
        scale = torch.cat([form.scale for form in eights])
        return _Int8(torch.cat([form.values for form in eights]), scale, rotation)
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
    scale = torch.cat([form.scale for form in fours])
    return _Int4(values, scale, zeros, fours[0].order, fours[0].rotation)


def _fit(form: _Int4, other: _Int4) -> bool:
    """Return whether both have equal groups and rotations, and one order of inputs."""
    same = form.scale.shape[1] == other.scale.shape[1] and form.rotation == other.rotation
    return same and _same_order(form.order, other.order)


def _fit_blocks(form: _BlockForm, other: _BlockForm) -> bool:
    """Return whether both are of one kind, in equal blocks, with one order of inputs."""
    one, two = form.blocks, other.blocks
    same = one.kind == two.kind and one.scale.shape[1] == two.scale.shape[1]
    return same and _same_order(form.order, other.order)


def _fit_tables(one: Tables, two: Tables) -> bool:
    """Return whether both have equal blocks, and one table or each output its own."""
    if one.scale.shape[1] != two.scale.shape[1] or one.bits != two.bits:
        return False
    owns = len(one.table) > 1, len(two.table) > 1
    return owns == (True, True) or (owns == (False, False) and torch.equal(one.table, two.table))


def _same_order(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)
