"""Skips work on tokens whose hidden states nobody asked for."""

from __future__ import annotations

import torch

from quire.attention import StepInputs
from quire.layers.token_columns import TokenColumns
from quire.ops import OpSet

__all__ = ["WantedTokens"]


class WantedTokens:
    """Stands in every block between attention and all that follows it. Behind the last attention a
    token is of use to itself alone, so there only those go on whose hidden states are asked for: of
    a prompt the last one."""

    def __init__(self, ops: OpSet, columns: TokenColumns, *, is_last: bool) -> None:
        """columns: that the model's layers read. is_last: whether the block is the model's last."""
        self._take = ops.embedding
        self._columns = columns
        self._is_last = is_last

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """attended [T, A] and the residual stream [T, E]; of the last block [N, A] and [N, E]."""
        wanted = step.wanted_tokens
        if wanted is None or not self._is_last:
            return attended, residual
        self._columns.select(wanted)
        return self._take(wanted, attended), self._take(wanted, residual)
