"""Decode steps that are captured once per number of rows and then replayed by one call."""

from __future__ import annotations

import logging

import torch

from quire.models import CausalLM
from quire.ops.capture import ArenaFullError, CaptureArena, CapturedCalls, capture
from quire.ops.replay import NotCapturableError
from quire.ops.team import Team
from quire.runner.decode_inputs import DecodeInputs
from quire.runner.replay_failures import ReplayFailures
from quire.runner.rows import ScheduledRows, Slots

__all__ = ["CapturedSteps"]

_log = logging.getLogger("quire.runner")


class CapturedSteps:
    """Steps in which each of 1 to `max_rows` rows computes one token and samples the next.

    The first step of so many rows is captured as it is computed; later ones of as many rows, which
    they are does not matter, cost no work in Python. A model that does more than call kernels is
    never captured: after the first try it stays with whoever computes the other steps. So does a
    number of rows for which the arena is too small.
    """

    def __init__(
        self,
        model: CausalLM,
        inputs: DecodeInputs,
        slots: Slots,
        team: Team,
        arena: CaptureArena,
    ) -> None:
        """inputs: of the rows in `slots` [max_rows], which is written here; empty to capture
        nothing. team: that computes the model's kernels."""
        self._model = model
        self._inputs = inputs
        self._slots = slots
        self._team = team
        self._arena = arena
        self._max_rows = len(slots)
        self._failures = ReplayFailures("decode steps")
        self._steps: dict[int, CapturedCalls] = {}

    def logits(self, rows: ScheduledRows) -> torch.Tensor | None:
        """Logits float32 [R, V] of rows [R], to be read before the next call, or None if these rows
        have to be computed the other way. Raises EngineError if a kernel fails."""
        num_rows = len(rows.slots)
        if num_rows > self._max_rows or not rows.samples.all() or (rows.num_tokens != 1).any():
            return None
        self._slots[:num_rows] = rows.slots
        step = self._steps.get(num_rows)
        try:
            return self._capture(num_rows) if step is None else step.replay()
        except Exception:
            if self._failures.note():
                self._max_rows = 0
            raise

    def _capture(self, num_rows: int) -> torch.Tensor | None:
        try:
            step = capture(self._team, self._arena, lambda: self._compute(num_rows))
        except ArenaFullError as error:
            _log.warning("decode steps of %d rows and more are not captured: %s", num_rows, error)
            self._max_rows = num_rows - 1
            return None
        except NotCapturableError as error:
            _log.info("decode steps of this model are not captured: %s", error)
            self._max_rows = 0
            return None
        self._steps[num_rows] = step
        return step.result

    def _compute(self, num_rows: int) -> torch.Tensor:
        inputs = self._inputs.gather(num_rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.step)
        return self._model.logits(hidden)
