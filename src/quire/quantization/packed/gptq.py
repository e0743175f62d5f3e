"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and its successors store it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import GPTQ
from quire.quantization.packed.integers import Integers, fields, neighbours

__all__ = ["gptq"]


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
