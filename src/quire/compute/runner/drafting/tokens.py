"""Common parts of what makes drafts on the data side."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch

from quire.compute.runner.rows import RowTable, Slots
from quire.compute.sampling import Draw, SamplingState
from quire.protocol.step import DRAFT_OF_MODEL, IntArray, StepPlan

__all__ = ["DraftDraws", "StepDrafter", "rows_to_draft", "warn_of_failure"]

_log = logging.getLogger("quire.runner")


class StepDrafter(Protocol):
    """Fills in the drafts that plans leave to weights on the data side. A row whose drafts cannot
    be made is computed without them: a guess must not cost a request."""

    def settle(self) -> None:
        """The last step is over. Before the next plan is applied."""
        ...

    def propose(self, plan: StepPlan) -> None:
        """Make the drafts of a plan that was applied to the rows."""
        ...


class DraftDraws:
    """Draws drafts by the parameters and with the noise of their rows, so that weights that agree
    with the model draw what that will. Edits of logits are left out: they make drafts worse, never
    wrong."""

    def __init__(self, sampling: SamplingState, draw: Draw) -> None:
        """draw: the operation."""
        self._sampling = sampling
        self._draw = draw

    def __call__(self, logits: torch.Tensor, slots: Slots, positions: Slots) -> IntArray:
        """logits [R, V] → tokens int32 [R] of rows `slots`, at absolute `positions` [R]; negative
        where there is none."""
        columns = self._sampling.draw_parameters(slots)
        parameters = [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
        index = torch.arange(len(slots))
        return self._draw(logits, index, *parameters, torch.from_numpy(positions)).numpy()


def rows_to_draft(plan: StepPlan, rows: RowTable) -> Slots:
    """Slots [R] whose drafts the plan leaves to weights; those that have failed get none."""
    of_model = plan.draft_slot[plan.draft_token == DRAFT_OF_MODEL]
    slots = np.unique(of_model).astype(np.int64)
    rows.num_drafts[slots[rows.failed[slots]]] = 0
    return slots[~rows.failed[slots]]


def warn_of_failure() -> None:
    """Log the exception that is being handled."""
    _log.warning("the draft model failed; steps go on without drafts", exc_info=True)
