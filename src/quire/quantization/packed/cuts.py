"""Parts of stored matrices for ranks: some outputs and some inputs, with the same numbers.

One function per scheme, from its tensors to those of the part. A part begins and ends where a word,
a block or a group of the scheme does; elsewhere there is none, and `UncutError` says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from quire.config.packed.schemes import (
    AWQ,
    GPTQ,
    MXFP4,
    BitsAndBytes4,
    BitsAndBytes8,
    BlockState,
    Float8,
    GGUFBlocks,
    PackedIntegers,
    PlainIntegers,
    SqueezeLLM,
)
from quire.quantization.packed.integers import fields, neighbours

__all__ = ["CUTS", "Part", "UncutError"]

WORD = 32
Tensors = Mapping[str, torch.Tensor]


class UncutError(Exception):
    """A part would begin or end within what cannot be cut; the message says at which numbers it
    may."""


class Part(NamedTuple):
    """outputs, inputs: what a rank has of a matrix of `shape`."""

    outputs: range
    inputs: range
    shape: tuple[int, int]


class _Axis(NamedTuple):
    """Range that is taken of one dimension of `total` things, called `noun`."""

    taken: range
    total: int
    noun: str

    def of(self, tensor: torch.Tensor, dim: int, unit: int = 1, width: int = 1) -> torch.Tensor:
        """unit: things that lie in `width` indices of the dimension."""
        first, past = self.taken.start, self.taken.stop
        if first % unit or (past % unit and past != self.total):
            raise UncutError(f"{self.noun} {first} to {past}; it can be at multiples of {unit}")
        index = slice(first // unit * width, -(-past // unit) * width)
        return tensor[(slice(None),) * dim + (index,)]

    def words(self, tensor: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
        """Take numbers in words of 32 bits, some of which may lie in two words."""
        bits_together = math.lcm(WORD, bits)
        return self.of(tensor, dim, bits_together // bits, bits_together // WORD)

    def groups(self, tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Take one index per group of `size` things; -1, or a single index: of all."""
        return tensor if size == -1 or tensor.shape[dim] == 1 else self.of(tensor, dim, size)


def _axes(part: Part) -> tuple[_Axis, _Axis]:
    outputs, inputs = part.shape
    return _Axis(part.outputs, outputs, "outputs"), _Axis(part.inputs, inputs, "inputs")


def awq(scheme: AWQ, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = _axes(part)
    size, found = scheme.group_size, {}
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
            _Axis(part.inputs, part.shape[1], "inputs").of(each, 1, size)[:, :count]
            for each in (scales, zeros)
        )
    padding = (0, -scales.shape[1] % 32)  # as many as any group size asks for
    found["qzeros"] = _nibble_words(torch.nn.functional.pad(zeros, padding))
    found["scales"] = torch.nn.functional.pad(scales, padding)
    return found


def _nibble_words(values: torch.Tensor) -> torch.Tensor:
    """uint8 [R, n] → int32 [R, n / 8], the lowest bits first."""
    shifts = torch.arange(0, WORD, 4, device=values.device)
    words = (values.long().unflatten(1, (-1, 8)) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << WORD), words).to(torch.int32)


def gptq(scheme: GPTQ, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    """With inputs in any order (`desc_act`) a part keeps the scales of all groups."""
    outputs, inputs = _axes(part)
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


def packed_integers(scheme: PackedIntegers, tensors: Tensors, part: Part) -> Any:
    outputs, inputs = _axes(part)
    bits, size = scheme.bits, scheme.group_size
    found = {"weight_packed": inputs.words(outputs.of(tensors["weight_packed"], 0), 1, bits)}
    index = tensors.get("weight_g_idx")
    if index is not None and size != -1 and not bool((index < 0).any()):
        if not neighbours(index, size):
            found["weight_g_idx"], size = inputs.of(index, 0), -1
        else:
            found["weight_g_idx"] = inputs.of(index, 0) - part.inputs.start // size
    found["weight_scale"] = _scales(tensors["weight_scale"], outputs, inputs, size)
    if "weight_zero_point" in tensors:
        zeros = outputs.words(tensors["weight_zero_point"], 0, bits)
        found["weight_zero_point"] = inputs.groups(zeros, 1, size)
    if "weight_shape" in tensors:
        found["weight_shape"] = torch.tensor([len(part.outputs), len(part.inputs)])
    return found


def plain_integers(scheme: PlainIntegers, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = _axes(part)
    found = {"weight": inputs.of(outputs.of(tensors["weight"], 0), 1)}
    for kind in ("weight_scale", "weight_zero_point"):
        if kind in tensors:
            found[kind] = _scales(tensors[kind], outputs, inputs, scheme.group_size)
    return found


def _scales(scale: torch.Tensor, outputs: _Axis, inputs: _Axis, size: int) -> torch.Tensor:
    if scale.numel() == 1:
        return scale
    return inputs.groups(outputs.of(scale.reshape(outputs.total, -1), 0), 1, size)


def float8(scheme: Float8, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = _axes(part)
    kind = scheme.scale_of(tensors)
    scale = tensors[kind]
    if scale.numel() > 1 and scheme.block is None:
        scale = outputs.of(scale, 0)
    elif scale.numel() > 1 and scheme.block is not None:
        rows, columns = scheme.block
        scale = inputs.groups(outputs.groups(scale, 0, rows), 1, columns)
    return {"weight": inputs.of(outputs.of(tensors["weight"], 0), 1), kind: scale}


def mxfp4(scheme: MXFP4, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    del scheme
    outputs, inputs = _axes(part)
    widths = {"weight_packed": 16, "weight_scale": 1, "weight_blocks": 1, "weight_scales": 1}
    return {
        kind: inputs.of(outputs.of(tensor, 0), 1, 32, widths[kind])
        for kind, tensor in tensors.items()
    }


def bits_and_bytes_4(
    scheme: BitsAndBytes4, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    """Blocks go on from row to row. Largest magnitudes that are quantized become float32, since
    those of a part are no whole number of their blocks."""
    kind = scheme.state_of(tensors)
    state = BlockState.of(tensors[kind].cpu().numpy().tobytes())
    outputs, inputs = _axes(part)
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
        numbers = _Axis(
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


def bits_and_bytes_8(
    scheme: BitsAndBytes8, tensors: Tensors, part: Part
) -> dict[str, torch.Tensor]:
    del scheme
    outputs, inputs = _axes(part)
    weight = inputs.of(outputs.of(tensors["weight"], 0), 1)
    return {"weight": weight, "SCB": outputs.of(tensors["SCB"], 0)}


def squeezellm(scheme: SqueezeLLM, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = _axes(part)
    found = {
        "qweight": outputs.of(inputs.words(tensors["qweight"], 0, scheme.bits), 1),
        "lookup_table": outputs.of(tensors["lookup_table"], 0),
    }
    if "rows" in tensors:
        ends = tensors["rows"][part.outputs.start : part.outputs.stop + 1].long()
        chosen = slice(int(ends[0]), int(ends[-1]))
        columns, numbers = tensors["cols"][chosen], tensors["vals"][chosen]
        here = (columns >= part.inputs.start) & (columns < part.inputs.stop)
        before = torch.nn.functional.pad(here.cumsum(0), (1, 0))
        found["rows"] = before[ends - ends[0]].to(torch.int32)
        found["cols"] = columns[here] - part.inputs.start
        found["vals"] = numbers[here]
    if "full_rows" in tensors:
        index = tensors["full_row_indices"]
        mine = (index >= part.outputs.start) & (index < part.outputs.stop)
        found["full_rows"] = inputs.of(tensors["full_rows"], 0)[:, mine]
        found["full_row_indices"] = index[mine] - part.outputs.start
    return found


def gguf_blocks(scheme: GGUFBlocks, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    """Between blocks: those of K-quants have 256 inputs."""
    outputs, inputs = _axes(part)
    blocks, size = tensors["blocks"], scheme.block_size
    width = blocks.shape[1] * size // inputs.total
    return {"blocks": inputs.of(outputs.of(blocks, 0), 1, size, width)}


CUTS: Mapping[type, Callable[..., dict[str, torch.Tensor]]] = MappingProxyType(
    {
        AWQ: awq,
        GPTQ: gptq,
        MXFP4: mxfp4,
        BitsAndBytes4: bits_and_bytes_4,
        BitsAndBytes8: bits_and_bytes_8,
        Float8: float8,
        GGUFBlocks: gguf_blocks,
        PackedIntegers: packed_integers,
        PlainIntegers: plain_integers,
        SqueezeLLM: squeezellm,
    }
)
"""Functions by scheme: the tensors of a part, from the scheme, its tensors and the part."""
