"""Integers as the compressed-tensors library stores them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import PackedIntegers, PlainIntegers
from quire.quantization.packed.integers import Integers, fields, neighbours

__all__ = ["UNSET", "packed_integers", "plain_integers"]

UNSET = -1
"""In weight_g_idx: inputs keep their order."""


def packed_integers(
    scheme: PackedIntegers, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> Integers:
    """(q - z) · s, where q and z are stored with half of the range added; a symmetric z is 0."""
    bits, words = scheme.bits, tensors["weight_packed"]
    index = tensors.get("weight_g_idx")
    if index is not None and bool((index == UNSET).any()):
        index = None
    values = fields(words[outputs], bits)
    shape = tensors.get("weight_shape")
    if shape is not None:
        values = values[:, : int(shape[1])]
    scales = _scales(tensors["weight_scale"], len(words), outputs)
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
    """(q - z) · s; a symmetric z is 0."""
    weight = tensors["weight"]
    values = weight[outputs]
    scales = _scales(tensors["weight_scale"], len(weight), outputs)
    zeros: torch.Tensor | int = 0
    if not scheme.symmetric:
        zeros = _scales(tensors["weight_zero_point"], len(weight), outputs).to(torch.int16)
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    return Integers(values, zeros, scales, size)


def _scales(scale: torch.Tensor, num_outputs: int, outputs: slice) -> torch.Tensor:
    """Scales of some outputs, float32 [R, G]; one of the whole matrix is that of each of them."""
    if scale.numel() == 1:
        return scale.float().reshape(1, 1).expand(outputs.stop - outputs.start, 1)
    return scale.float().reshape(num_outputs, -1)[outputs]
