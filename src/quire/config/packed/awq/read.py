"""Meaning of the bits of AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.awq.scheme import AWQ
from quire.config.packed.read import Axis, Integers, Part, Reading, Tensors, axes_of, fields
from quire.config.packed.scheme import WORD

__all__ = ["READINGS"]

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 neighbouring outputs among the fields of a "gemm" word, which hold outputs 0,
2, 4, 6, 1, 3, 5, 7."""


def awq(scheme: AWQ, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Integers:
    """(q - z) · s; 4 bits, a zero point and a scale for each group of neighbouring inputs."""
    if scheme.packing == "gemv":
        values = fields(tensors["qweight"][outputs], 4)
        num_groups = scheme.num_groups(values.shape[1])
        zeros = fields(tensors["qzeros"][outputs], 4)[:, :num_groups]
        scales = tensors["scales"][outputs, :num_groups]
    else:
        words = slice(outputs.start // 8, outputs.stop // 8)
        values = _outputs(tensors["qweight"][:, words])
        zeros = _outputs(tensors["qzeros"][:, words])
        scales = tensors["scales"][:, outputs].t()
    size = values.shape[1] if scheme.group_size == -1 else scheme.group_size
    return Integers(values, zeros, scales.float(), size)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, O / 8] → uint8 [O, n]."""
    return fields(words, 4).reshape(len(words), -1, 8)[:, :, list(ORDER)].flatten(1).t()


def cut_awq(scheme: AWQ, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = axes_of(part)
    size, found = scheme.group_size, dict[str, torch.Tensor]()
    if scheme.packing == "gemm":
        found["qweight"] = outputs.words(inputs.of(tensors["qweight"], 0), 1, 4)
        found["qzeros"] = outputs.words(inputs.groups(tensors["qzeros"], 0, size), 1, 4)
        found["scales"] = outputs.of(inputs.groups(tensors["scales"], 0, size), 1)
        return found
    found["qweight"] = inputs.words(outputs.of(tensors["qweight"], 0), 1, 4)
    zeros = fields(outputs.of(tensors["qzeros"], 0), 4)
    scales = outputs.of(tensors["scales"], 0)
    if size != -1:
        count = scheme.num_groups(len(part.inputs))
        scales, zeros = (
            Axis(part.inputs, part.shape[1], "inputs").of(each, 1, size)[:, :count]
            for each in (scales, zeros)
        )
    padding = (0, -scales.shape[1] % 32)  # as many as any group size asks for
    found["qzeros"] = _nibble_words(torch.nn.functional.pad(zeros, padding))
    found["scales"] = torch.nn.functional.pad(scales, padding)
    return found


def _nibble_words(values: torch.Tensor) -> torch.Tensor:
    """uint8 [R, n] → int32 [R, n / 8], the lowest bits first."""
    shifts = torch.arange(0, WORD, 4, device=values.device)
    words = (values.long().reshape(len(values), -1, 8) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << WORD), words).to(torch.int32)


READINGS: Mapping[type, Reading] = MappingProxyType({AWQ: Reading(awq, cut_awq)})
