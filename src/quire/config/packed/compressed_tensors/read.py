"""Meaning of the bits of compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.compressed_tensors.scheme import PackedIntegers, PlainIntegers
from quire.config.packed.read import (
    Axis,
    Integers,
    Part,
    Reading,
    Tensors,
    axes_of,
    check_index,
    check_range,
    fields,
    neighbours,
)

__all__ = ["READINGS"]

UNSET = -1
"""In weight_g_idx: inputs keep their order."""


def packed_integers(
    scheme: PackedIntegers, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> Integers:
    """(q - z) · s, where q and z are stored with half of the range added; a symmetric z is 0. Of
    rotated weights W · H / √n, the integers are those of W · H / n (`linear_int8`)."""
    bits, words = scheme.bits, tensors["weight_packed"]
    index = tensors.get("weight_g_idx")
    if index is not None and bool((index == UNSET).any()):
        index = None
    values = fields(words[outputs], bits)
    shape = tensors.get("weight_shape")
    if shape is not None:
        values = values[:, : int(shape[1])]
    scales = _unrooted(_scales(tensors["weight_scale"], len(words), outputs), scheme.rotation)
    zeros: torch.Tensor | int = 1 << bits - 1
    if not scheme.symmetric:
        rows = slice(outputs.start * bits // 32, -(-outputs.stop * bits // 32))
        zeros = fields(tensors["weight_zero_point"][rows].t(), bits).t()[: len(values)]
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    ordered = index is None or scales.shape[1] == 1 or neighbours(index, size)
    return Integers(values, zeros, scales, size if index is None or ordered else index.long())


def plain_integers(
    scheme: PlainIntegers, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> Integers:
    """(q - z) · s; a symmetric z is 0. Rotated weights as above."""
    weight = tensors["weight"]
    values = weight[outputs]
    scales = _unrooted(_scales(tensors["weight_scale"], len(weight), outputs), scheme.rotation)
    zeros: torch.Tensor | int = 0
    if not scheme.symmetric:
        zeros = _scales(tensors["weight_zero_point"], len(weight), outputs).to(torch.int16)
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    return Integers(values, zeros, scales, size)


def _unrooted(scales: torch.Tensor, rotation: int) -> torch.Tensor:
    """Divide scales by the root of `rotation`. What comes within 2**-20 of numbers of 11 bits is
    these: the division was of what they were multiplied to (`compress`)."""
    scales = scales / math.sqrt(rotation)
    if math.isqrt(rotation) ** 2 == rotation:
        return scales
    mantissa, exponent = torch.frexp(scales)
    rounded = torch.ldexp((mantissa * 2**11).round_() / 2**11, exponent)
    is_near = bool(((rounded - scales).abs() <= scales.abs() * 2**-20).all())
    return rounded if is_near else scales


def _scales(scale: torch.Tensor, num_outputs: int, outputs: slice) -> torch.Tensor:
    """Scales of some outputs, float32 [R, G]; one of the whole matrix is that of each of them."""
    if scale.numel() == 1:
        return scale.float().reshape(1, 1).expand(outputs.stop - outputs.start, 1)
    return scale.float().reshape(num_outputs, -1)[outputs]


def cut_packed_integers(
    scheme: PackedIntegers, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    outputs, inputs = axes_of(part)
    bits, size = scheme.bits, scheme.group_size
    found = {"weight_packed": inputs.words(outputs.of(tensors["weight_packed"], 0), 1, bits)}
    index = tensors.get("weight_g_idx")
    if index is not None and size != -1 and not bool((index < 0).any()):
        if not neighbours(index, size):
            found["weight_g_idx"], size = inputs.of(index, 0), -1
        else:
            found["weight_g_idx"] = inputs.of(index, 0) - part.inputs.start // size
    found["weight_scale"] = _cut_scales(tensors["weight_scale"], outputs, inputs, size)
    if "weight_zero_point" in tensors:
        zeros = outputs.words(tensors["weight_zero_point"], 0, bits)
        found["weight_zero_point"] = inputs.groups(zeros, 1, size)
    if "weight_shape" in tensors:
        found["weight_shape"] = torch.tensor([len(part.outputs), len(part.inputs)])
    return found


def cut_plain_integers(
    scheme: PlainIntegers, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    outputs, inputs = axes_of(part)
    found = {"weight": inputs.of(outputs.of(tensors["weight"], 0), 1)}
    for kind in ("weight_scale", "weight_zero_point"):
        if kind in tensors:
            found[kind] = _cut_scales(tensors[kind], outputs, inputs, scheme.group_size)
    return found


def _cut_scales(scale: torch.Tensor, outputs: Axis, inputs: Axis, size: int) -> torch.Tensor:
    if scale.numel() == 1:
        return scale
    return inputs.groups(outputs.of(scale.reshape(outputs.total, -1), 0), 1, size)


def _check_packed(scheme: PackedIntegers, tensors: Tensors, shape: tuple[int, int]) -> None:
    del scheme
    check_index(tensors, "weight_g_idx", "weight_scale", shape[0], lowest=UNSET)


def _check_plain(scheme: PlainIntegers, tensors: Tensors, shape: tuple[int, int]) -> None:
    del shape
    if scheme.bits == 4:
        check_range(tensors, "weight", -8, 7)


READINGS: Mapping[type, Reading] = MappingProxyType(
    {
        PackedIntegers: Reading(packed_integers, cut_packed_integers, _check_packed),
        PlainIntegers: Reading(plain_integers, cut_plain_integers, _check_plain),
    }
)
