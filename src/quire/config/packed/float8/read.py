"""Meaning of the bits of floating-point numbers of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.float8.scheme import Float8
from quire.config.packed.read import Part, Reading, Tensors, axes_of, check_exponents, spread
from quire.ops.linear.tables.contract import Tables

__all__ = ["READINGS"]


def float8(scheme: Float8, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Tables:
    """q · s, with one scale for the matrix, for each output, or for each block."""
    codes = tensors["weight"][outputs].view(torch.uint8)
    every = torch.arange(256, dtype=torch.uint8, device=codes.device)
    table = every.view(torch.float8_e4m3fn).float()[None]
    scale = tensors[scheme.scale_of(tensors)].float()
    if scale.numel() == 1:
        return Tables(codes, table, scale.reshape(1, 1).expand(len(codes), 1))
    if scheme.block is None:
        return Tables(codes, table, scale.reshape(-1, 1)[outputs])
    rows, columns = scheme.block
    row = torch.arange(outputs.start, outputs.stop, device=scale.device) // rows
    inputs = codes.shape[1]
    shared = math.gcd(columns, inputs)  # a block that is cut off ends there too
    return Tables(codes, table, spread(scale[row], columns // shared, inputs // shared))


def cut_float8(scheme: Float8, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    outputs, inputs = axes_of(part)
    kind = scheme.scale_of(tensors)
    scale = tensors[kind]
    if scale.numel() > 1 and scheme.block is None:
        scale = outputs.of(scale, 0)
    elif scale.numel() > 1 and scheme.block is not None:
        rows, columns = scheme.block
        scale = inputs.groups(outputs.groups(scale, 0, rows), 1, columns)
    return {"weight": inputs.of(outputs.of(tensors["weight"], 0), 1), kind: scale}


def _check(scheme: Float8, tensors: Tensors, shape: tuple[int, int]) -> None:
    del scheme, shape
    check_exponents(tensors, "weight_scale")


READINGS: Mapping[type, Reading] = MappingProxyType({Float8: Reading(float8, cut_float8, _check)})
