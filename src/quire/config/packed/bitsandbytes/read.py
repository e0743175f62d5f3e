"""Meaning of the bits of bitsandbytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.bitsandbytes.scheme import BitsAndBytes4, BitsAndBytes8, BlockState
from quire.config.packed.read import Axis, Integers, Part, Reading, Tensors, UncutError, axes_of
from quire.ops.linear.tables.contract import Tables

__all__ = ["READINGS"]


def bits_and_bytes_4(
    scheme: BitsAndBytes4, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> Tables:
    """table[q] · absmax (QLoRA, Dettmers et al. 2023, section 3): numbers row after row, high
    nibble first, in blocks that rows do not cut. An absmax that is quantized itself is
    table2[a] · absmax2 + offset."""
    state = BlockState.of(tensors[scheme.state_of(tensors)].cpu().numpy().tobytes())
    inputs = state.shape[1]
    first, past = outputs.start * inputs, outputs.stop * inputs
    packed = tensors["weight"].view(torch.uint8).flatten()[first // 2 : -(-past // 2)]
    nibbles = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
    codes = nibbles[first % 2 :][: past - first].view(-1, inputs)
    low, high = first // state.block_size, (past - 1) // state.block_size + 1
    absmax = tensors["weight.absmax"][low:high]
    if state.nested_block_size is not None:
        outer = torch.arange(low, high, device=packed.device) // state.nested_block_size
        table = tensors["weight.nested_quant_map"]
        absmax = table[absmax.long()] * tensors["weight.nested_absmax"][outer]
        absmax = absmax + state.nested_offset
    shared = math.gcd(inputs, state.block_size)  # no row and no block ends within
    start = torch.arange(first, past, shared, device=packed.device).view(len(codes), -1)
    scale = absmax[start // state.block_size - low]
    return Tables(codes, tensors["weight.quant_map"][None], scale)


def bits_and_bytes_8(
    scheme: BitsAndBytes8, tensors: Mapping[str, torch.Tensor], outputs: slice
) -> Integers:
    """q · SCB / 127."""
    del scheme
    scales = tensors["SCB"][outputs].float()[:, None] / 127
    values = tensors["weight"][outputs]
    return Integers(values, 0, scales, values.shape[1])


def cut_bits_and_bytes_4(
    scheme: BitsAndBytes4, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    """Blocks go on from row to row. Largest magnitudes that are quantized become float32, since
    those of a part are no whole number of their blocks."""
    kind = scheme.state_of(tensors)
    state = BlockState.of(tensors[kind].cpu().numpy().tobytes())
    outputs, inputs = axes_of(part)
    size = state.block_size
    absmax = tensors["weight.absmax"]
    if state.nested_block_size is not None:
        outer = torch.arange(len(absmax), device=absmax.device) // state.nested_block_size
        table = tensors["weight.nested_quant_map"]
        absmax = table[absmax.long()] * tensors["weight.nested_absmax"][outer]
        absmax = absmax + state.nested_offset
    packed = tensors["weight"].view(torch.uint8).flatten()
    if len(part.inputs) == inputs.total:
        row = inputs.total
        numbers = Axis(
            range(part.outputs.start * row, part.outputs.stop * row),
            outputs.total * row,
            "numbers, row after row,",
        )
        packed, absmax = numbers.of(packed, 0, 2), numbers.of(absmax, 0, size)
    else:
        if inputs.total % size or size % 2:
            raise UncutError(f"inputs: blocks of {size} go on from one output to the next")
        packed = inputs.of(outputs.of(packed.view(outputs.total, -1), 0), 1, size, size // 2)
        absmax = inputs.of(outputs.of(absmax.view(outputs.total, -1), 0), 1, size)
    text = json.dumps({"shape": [len(part.outputs), len(part.inputs)], "blocksize": size})
    return {
        "weight": packed.reshape(-1, 1),
        "weight.absmax": absmax.flatten(),
        "weight.quant_map": tensors["weight.quant_map"],
        kind: torch.tensor(list(text.encode()), dtype=torch.uint8),
    }


def cut_bits_and_bytes_8(
    scheme: BitsAndBytes8, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    del scheme
    outputs, inputs = axes_of(part)
    weight = inputs.of(outputs.of(tensors["weight"], 0), 1)
    return {"weight": weight, "SCB": outputs.of(tensors["SCB"], 0)}


READINGS: Mapping[type, Reading] = MappingProxyType(
    {
        BitsAndBytes4: Reading(bits_and_bytes_4, cut_bits_and_bytes_4),
        BitsAndBytes8: Reading(bits_and_bytes_8, cut_bits_and_bytes_8),
    }
)
