"""Skips work on tokens whose hidden states are not needed."""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers.taps import StateTaps
from quire.compute.layers.token_columns import TokenColumns
from quire.ops import OpSet

__all__ = ["WantedTokens"]


class WantedTokens:
    """Stands in every block between attention and the layers behind it. Behind the last attention
    tokens no longer affect each other, so only those whose hidden states are needed continue: the
    last one of a prompt."""

    def __init__(
        self,
        ops: OpSet,
        columns: TokenColumns,
        *,
        is_last: bool,
        layer: int | None = None,
        taps: StateTaps | None = None,
    ) -> None:
        """columns: read by the model's layers. is_last: True in the model's last block. taps: notes
        the stream before the block, whose number is `layer`."""
        self._take = ops.embedding
        self._columns = columns
        self._is_last = is_last
        self._layer = layer
        self._taps = taps

    def __call__(
        self, attended: torch.Tensor, residual: torch.Tensor, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attended [T, A] and the residual stream [T, E]; in the last block [N, A] and [N,
        E]."""
        if self._taps is not None and self._layer is not None:
            self._taps.note(self._layer, residual)
        attended, residual = self.of(step, attended, residual)
        return attended, residual

    def of(self, step: StepInputs, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return states [T, …] that the block needs behind attention; in the last block [N, …]."""
        wanted = step.wanted_tokens
        if wanted is None or not self._is_last:
            return states
        self._columns.select(wanted)
        return tuple(self._take(wanted, state) for state in states)
