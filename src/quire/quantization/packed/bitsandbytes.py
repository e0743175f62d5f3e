"""4 and 8 bits as bitsandbytes stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from quire.config.packed.schemes import BitsAndBytes4, BitsAndBytes8, BlockState
from quire.ops.linear.tables.contract import Tables
from quire.quantization.packed.integers import Integers

__all__ = ["bits_and_bytes_4", "bits_and_bytes_8"]


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
