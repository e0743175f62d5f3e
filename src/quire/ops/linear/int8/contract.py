"""Contract of `linear_int8`."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.config.quantization import INT8_MAX_INPUTS
from quire.ops.linear.plain.contract import check_gate
from quire.ops.linear.rotate.reference import check_rotation

__all__ = ["check_arguments"]


def check_arguments(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str | None = None,
    rotation: int = 1,
) -> None:
    """Raises EngineError unless weight is int8 [O, I], scale float32 [O] and bias [O] or None, and
    as `check_gate` and `check_rotation`."""
    if (
        weight.dtype != torch.int8
        or weight.dim() != 2
        or weight.shape[0] == 0
        or not 0 < weight.shape[1] <= INT8_MAX_INPUTS
    ):
        raise EngineError(
            f"linear_int8 takes an int8 matrix of at least one output, with 1 to {INT8_MAX_INPUTS} "
            f"inputs, not "
            f"{weight.dtype}{list(weight.shape)}."
        )
    outputs = weight.shape[0]
    if scale.dtype != torch.float32 or scale.shape != (outputs,):
        raise EngineError(
            f"linear_int8 takes one float32 scale for each of {outputs} outputs, not "
            f"{scale.dtype}{list(scale.shape)}."
        )
    if bias is not None and bias.shape != (outputs,):
        raise EngineError(
            f"linear_int8 takes a bias of {outputs} numbers, not of {list(bias.shape)}."
        )
    check_gate(outputs, gate)
    check_rotation(rotation, weight.shape[1])
