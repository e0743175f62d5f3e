"""The part of a layer that has a state of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.compute.attention import StateInputs, StepInputs
from quire.compute.layers.weights import Cut, DenseWeights
from quire.config.shard import Share
from quire.ops import OpSet

__all__ = ["RecurrentPart", "RowOperation", "StateBytes", "numbers_of_heads"]


class StateBytes:
    """Bytes that the parts of a model share, given to one part after the other: `states` of one
    sequence's state, and `kept` of one token that may be computed again."""

    def __init__(self) -> None:
        self.states = self.kept = 0


@dataclass(frozen=True, slots=True)
class RowOperation:
    """An operation of `quire.ops.recurrent`, with its weights and settings.

    call: takes inputs of tokens, the weights, states, read, write, slots, starts, num_computed
    (`quire.ops.recurrent.short_conv`), and the settings.
    """

    call: Callable[..., torch.Tensor]
    weights: tuple[torch.Tensor | None, ...]
    settings: tuple[Any, ...]


class RecurrentPart:
    """An operation from inputs of tokens [T, …], and from and to states of their rows.

    If the step keeps a row, its inputs are kept, so that the state after any of its tokens can be
    computed from the same state before: `replay`. A subclass names its operation and the widths of
    its inputs; all else is here.

    at, state_bytes: place of its state among a sequence's, in bytes. kept_at, kept_bytes: likewise,
    place of its inputs among those of a token.
    """

    def __init__(
        self,
        ops: OpSet,
        operation: RowOperation,
        total: StateBytes,
        state_bytes: int,
        state_dtype: torch.dtype,
        widths: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """total: bytes of the parts made so far. widths, dtype: numbers of a token in each
        input."""
        self._keep_tokens, self._operation = ops.keep_tokens, operation
        self.state_bytes, self.kept_bytes = state_bytes, sum(widths) * dtype.itemsize
        self._at, self._kept_at = total.states, total.kept
        self._state_dtype, self._dtype, self._widths = state_dtype, dtype, tuple(widths)
        self._places = self._states = torch.empty(0)  # of no step yet
        self._kept, self._inputs = self._places, list[torch.Tensor]()

    def advance(self, inputs: Sequence[torch.Tensor], step: StepInputs) -> torch.Tensor:
        """Compute the tokens of a step, and keep the inputs of those that it asks for."""
        rows = step.states
        assert rows is not None, "the step of a model with recurrent states has them"
        starts = step.query_start_loc
        if rows.kept is not None:
            if rows.kept is not self._kept:
                self._kept, self._inputs = rows.kept, self._split(rows.kept)
            for x, kept in zip(inputs, self._inputs, strict=True):
                self._keep_tokens(x, kept, rows.slots, starts, rows.keep)
        return self._compute(inputs, rows, starts)

    def replay(self, kept: torch.Tensor, rows: StateInputs, starts: torch.Tensor) -> None:
        """Compute tokens again for their states alone. kept: uint8 [T, bytes], inputs of all parts
        that a step has kept. rows: places of the rows, whose tokens begin at `starts` [R + 1]."""
        self._compute(self._split(kept), rows, starts)

    def _compute(
        self, inputs: Sequence[torch.Tensor], rows: StateInputs, starts: torch.Tensor
    ) -> torch.Tensor:
        of_rows = (rows.read, rows.write, rows.slots, starts, rows.num_computed)
        own, states = self._operation, self._own(rows.places)
        return own.call(*inputs, *own.weights, states, *of_rows, *own.settings)

    def _own(self, places: torch.Tensor) -> torch.Tensor:
        if places is not self._places:  # a view costs as much as the operation
            own = places[:, self._at : self._at + self.state_bytes]
            self._places, self._states = places, own.view(self._state_dtype)
        return self._states

    def _split(self, kept: torch.Tensor) -> list[torch.Tensor]:
        own = kept[:, self._kept_at : self._kept_at + self.kept_bytes].view(self._dtype)
        return list(own.split(self._widths, dim=1))


def numbers_of_heads(
    names: Sequence[str], heads: Share, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], DenseWeights]:
    """Return a float32 tensor [H] for each name on disk, of this rank's heads, and their loader."""
    numbers = tuple(torch.empty(heads.count, dtype=torch.float32, device=device) for _ in names)
    cuts = {} if heads.is_whole else dict.fromkeys(names, Cut(0, heads))
    return numbers, DenseWeights(dict(zip(names, numbers, strict=True)), cuts=cuts)
