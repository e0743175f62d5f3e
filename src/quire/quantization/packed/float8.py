"""Floating-point numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import Float8

__all__ = ["float8"]


def float8(scheme: Float8, tensors: Mapping[str, torch.Tensor], outputs: slice) -> torch.Tensor:
    """q · s, with one scale for the matrix, for each output, or for each block."""
    numbers = tensors["weight"][outputs].float()
    scale = tensors[scheme.scale_of(tensors)].float()
    if scale.numel() == 1:
        return numbers * scale.reshape(())
    if scheme.block is None:
        return numbers * scale.reshape(-1, 1)[outputs]
    rows, columns = scheme.block
    row = torch.arange(outputs.start, outputs.stop, device=scale.device) // rows
    column = torch.arange(numbers.shape[1], device=scale.device) // columns
    return numbers * scale[row][:, column]
