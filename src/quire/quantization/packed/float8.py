"""Floating-point numbers of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from quire.config.packed.schemes import Float8
from quire.ops.linear.tables.contract import Tables
from quire.quantization.packed.integers import spread

__all__ = ["float8"]


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
