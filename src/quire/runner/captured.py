"""Decode steps that are captured once per number of rows and then replayed by one call."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from quire.models import CausalLM
from quire.ops.capture import ArenaFullError, CaptureArena, CapturedCalls, capture
from quire.ops.replay import NotCapturableError
from quire.ops.team import Team
from quire.protocol.step import IntArray
from quire.runner.captured_draws import CapturedDraws
from quire.runner.decode_inputs import DecodeInputs
from quire.runner.replay_failures import ReplayFailures
from quire.runner.rows import ScheduledRows, Slots

__all__ = ["CapturedSteps", "Replayed"]

_log = logging.getLogger("quire.runner")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a captured step gave, to be read before the next: logits float32 [R, V], and token ids
    int32 [R] if it has drawn them, which the rows have then; -1 in rows that have none and fail."""

    logits: torch.Tensor
    token_ids: IntArray | None = None


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
        draws: CapturedDraws,
        team: Team,
        arena: CaptureArena,
    ) -> None:
        """inputs: of the rows in `slots` [max_rows], which is written here; empty to capture
        nothing. team: that computes the model's kernels, and the draws'."""
        self._model = model
        self._inputs = inputs
        self._slots = slots
        self._draws = draws
        self._team = team
        self._arena = arena
        self._max_rows = len(slots)
        self._failures = ReplayFailures("decode steps")
        self._steps: dict[int, CapturedCalls] = {}
        self._last_drawn: tuple[CapturedCalls, IntArray] | None = None

    def compute(self, rows: ScheduledRows, positions: Slots, *, draws: bool) -> Replayed | None:
        """Compute rows [R], or None if that has to be done the other way. Raises EngineError if a
        kernel fails.

        positions: int64 [R], of the tokens that these rows draw. draws: whether to draw them, if
            this step was captured with draws and no row asks for more.
        """
        self._last_drawn = None
        num_rows = len(rows.slots)
        if num_rows > self._max_rows or not rows.samples.all() or (rows.num_tokens != 1).any():
            return None
        self._slots[:num_rows] = rows.slots
        draws = self._draws.prepare(rows.slots, positions) and draws
        step = self._steps.get(num_rows)
        try:
            if step is None:
                logits = self._capture(num_rows)
                return None if logits is None else Replayed(logits)
            if draws and step.then_result is not None:
                token_ids = step.replay_all().numpy()
                self._last_drawn = step, token_ids
                return Replayed(step.result, token_ids)
            return Replayed(step.replay())
        except Exception:
            self._note_failure()
            raise

    def repeat(self) -> IntArray:
        """The step before once more, if it has drawn: its rows go on by a token each. Token ids as
        those of `Replayed`. Raises EngineError if a kernel fails; then no row has changed."""
        assert self._last_drawn is not None
        step, token_ids = self._last_drawn
        try:
            step.replay_all()
        except Exception:
            self._note_failure()
            raise
        return token_ids

    def _note_failure(self) -> None:
        """Of the exception that is being handled."""
        if self._failures.note():
            self._max_rows = 0

    def _capture(self, num_rows: int) -> torch.Tensor | None:
        try:
            step = capture(
                self._team, self._arena, lambda: self._compute(num_rows), then=self._draws
            )
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
