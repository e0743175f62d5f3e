"""Meaning of the bits of GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.gptq.scheme import GPTQ
from quire.config.packed.read import (
    Integers,
    Part,
    Reading,
    Tensors,
    axes_of,
    check_index,
    fields,
    neighbours,
)

__all__ = ["READINGS"]


def gptq(scheme: GPTQ, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Integers:
    """(q - z) · s; words of qweight go down the inputs, those of qzeros along the outputs. g_idx is
    the group of each input, which need not be that of its neighbour."""
    bits = scheme.bits
    values = fields(tensors["qweight"][:, outputs].t(), bits)
    scales = tensors["scales"][:, outputs].t().float()
    if scheme.symmetric:
        zeros = 1 << bits - 1
    else:
        words = slice(outputs.start * bits // 32, outputs.stop * bits // 32)
        zeros = _zeros(tensors["qzeros"][:, words], scheme).t()
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    index = tensors.get("g_idx")
    ordered = index is None or scales.shape[1] == 1 or neighbours(index, size)
    return Integers(values, zeros, scales, size if index is None or ordered else index.long())


def _zeros(words: torch.Tensor, scheme: GPTQ) -> torch.Tensor:
    """int32 [G, n] → zero points [G, O]. The first version took 1 from every field by a subtraction
    of whole words, which borrows from the next field where a zero point was 0; so the addition
    carries too. Fields of 3 bits cross words, and were written one by one."""
    bits = scheme.bits
    if not scheme.zeros_less_one:
        return fields(words, bits)
    if 32 % bits:
        return fields(words, bits) + 1 & (1 << bits) - 1
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return fields(words.long() + ones, bits)


def cut_gptq(scheme: GPTQ, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    """With inputs in any order (`desc_act`) a part keeps the scales of all groups."""
    outputs, inputs = axes_of(part)
    bits, size = scheme.bits, scheme.group_size
    found = {"qweight": outputs.of(inputs.words(tensors["qweight"], 0, bits), 1)}
    index = tensors.get("g_idx")
    if index is not None and size != -1:
        if not neighbours(index, size):
            found["g_idx"], size = inputs.of(index, 0), -1
        else:
            found["g_idx"] = inputs.of(index, 0) - part.inputs.start // size
    found["scales"] = outputs.of(inputs.groups(tensors["scales"], 0, size), 1)
    if "qzeros" in tensors:
        zeros = inputs.groups(tensors["qzeros"], 0, size)
        found["qzeros"] = zeros if scheme.symmetric else outputs.words(zeros, 1, bits)
    return found


def _check(scheme: GPTQ, tensors: Tensors, shape: tuple[int, int]) -> None:
    del scheme
    check_index(tensors, "g_idx", "scales", shape[0])


READINGS: Mapping[type, Reading] = MappingProxyType({GPTQ: Reading(gptq, cut_gptq, _check)})
