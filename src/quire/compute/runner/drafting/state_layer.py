"""Drafts by an EAGLE or MTP layer, which follows the states of the model with K/V of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quire.compute.attention import StepInputs
from quire.compute.runner.drafting.model import Build, DraftEntries, LayerDrafter
from quire.compute.runner.drafting.states import StatePages
from quire.compute.runner.drafting.tokens import DraftDraws
from quire.compute.runner.rows import Slots
from quire.ops.distributed import ALONE, Collectives
from quire.protocol.step import StepPlan

__all__ = ["StateDrafter", "StateHead"]


class StateHead(Protocol):
    """A layer that guesses tokens. The first guess of a step reads states of the model, `read` by
    it; further ones read what it gave itself."""

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """States of the model [T, W] → [T, E], as `forward` takes them."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """token_ids [T], and the state [T, E] before each, at `positions` [T] → [N, E] of the
        wanted tokens, of which `logits` and `next_states` are made."""
        ...

    def next_states(self, output: torch.Tensor) -> torch.Tensor:
        """States [N, E] for the guesses after those of an output [N, E] of `forward`."""
        ...

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Output [N, E] of `forward` → float32 [N, V], -inf where the head knows no token."""
        ...


class StateDrafter(LayerDrafter):
    """Entry i of the layer is of the state at token i and of token i + 1. The last entries of a
    step stand on guessed states, so they are computed anew with those of the model.

    The last entry of a block depends on the first token after it. Where rows that share the block
    differ there, it is that of the one which drafted first: worse drafts for the others, never
    wrong tokens.
    """

    shift = 1

    def __init__(
        self,
        head: StateHead,
        entries: DraftEntries,
        build: Build,
        draw: DraftDraws,
        max_tokens: int,
        states: StatePages,
        collectives: Collectives = ALONE,
    ) -> None:
        """states: kept states of the model. Other arguments: see `LayerDrafter`."""
        super().__init__(entries, build, draw, max_tokens, collectives)
        self._head = head
        self._states = states
        self._own_states: dict[int, torch.Tensor] = {}  # by slot, [E] for its next entry

    def follow(self, plan: StepPlan) -> None:
        super().follow(plan)
        self._states.apply(plan)

    def kept_after_step(self, slots: Slots, firsts: Slots) -> Slots:
        """Return how many entries stand on the model's states and come before the first guess."""
        del slots
        return firsts

    def may_draft(self, slots: Slots, starts: Slots, ends: Slots) -> np.ndarray:
        rows = self.rows
        may_draft = (ends > 0) & (rows.num_computed[slots] + 1 == rows.num_tokens[slots])
        for i in may_draft.nonzero()[0].tolist():
            may_draft[i] = self._states.has(int(slots[i]), int(starts[i]), int(ends[i]))
        return may_draft

    def forward(self, slots: Slots, starts: Slots, counts: Slots) -> torch.Tensor:
        inputs = self.inputs_of(slots, starts, counts)
        of_token = np.repeat(slots, counts)
        positions = inputs.positions.numpy()
        token_ids = torch.from_numpy(self.rows.token_ids[of_token, positions + 1])
        if starts[0] < self.rows.num_computed[slots[0]]:
            states = self._head.read(self._states.of(of_token, positions))
        else:
            states = torch.stack([self._own_states[slot] for slot in slots.tolist()])
        step = replace(inputs.step, wanted_tokens=inputs.last_token)
        output = self._head.forward(token_ids, states, inputs.positions, step)
        own = self._head.next_states(output)
        self._own_states.update(zip(slots.tolist(), own, strict=True))
        return self._head.logits(output)
