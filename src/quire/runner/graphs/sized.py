"""Forwards of any tokens, captured once and then replayed by one call."""

from __future__ import annotations

import logging

import torch

from quire.attention import StepInputs
from quire.models import CausalLM
from quire.ops.capture import ArenaFullError, CaptureArena, SizedCalls, capture_sizes
from quire.ops.replay import NotCapturableError
from quire.ops.team import Team
from quire.runner.graphs.failures import ReplayFailures
from quire.runner.inputs import InputGatherer, ModelInputs
from quire.runner.rows import ScheduledRows

__all__ = ["CapturedForward"]

_log = logging.getLogger("quire.runner")


class CapturedForward:
    """A `Computes` that replays the model's forward for all steps of up to `max_tokens` tokens and
    `max_rows` rows: what they are, and which tokens are wanted, stands in buffers that stay, how
    many they are in the arguments.

    It is recorded at once. Of a model that does more than call kernels or needs more than the arena
    has, nothing is captured. Then, and when a replay fails, the model computes call by call.
    """

    def __init__(
        self,
        model: CausalLM,
        inputs: InputGatherer,
        team: Team,
        arena: CaptureArena,
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        """team: that computes the model's kernels. max_tokens: 0 to capture nothing."""
        self._model = model
        self._inputs = inputs
        self._team = team
        self._arena = arena
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._failures = ReplayFailures("steps of prompts")
        self._batch = inputs.buffers(max_tokens, max_rows if max_tokens else 0)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._wanted = torch.zeros(max_tokens, dtype=torch.int64)
        self._calls = self._capture() if max_tokens else None
        self.logits = model.logits

    def build(self, rows: ScheduledRows) -> ModelInputs:
        """The inputs of a step, where its graph reads them."""
        num_tokens, num_rows = int(rows.num_tokens.sum()), len(rows.slots)
        if self._calls is None or num_tokens > self._max_tokens or num_rows > self._max_rows:
            batch = self._inputs.buffers(num_tokens, num_rows, empty=True)
        else:
            batch = self._batch.of_size(num_tokens, num_rows)
        return self._inputs.fill(rows, batch)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """As `CausalLM.forward`; the result is to be read before anything else is captured or
        replayed in the arena."""
        num_tokens, num_rows = len(token_ids), len(step.seq_lens)
        calls, wanted = self._calls, step.wanted_tokens
        if calls is None or token_ids.data_ptr() != self._batch.token_ids.data_ptr():
            return self._call_by_call(token_ids, positions, step)
        if wanted is None:
            wanted = torch.arange(num_tokens)
        try:
            self._starts[: num_rows + 1] = step.query_start_loc
            self._wanted[: len(wanted)] = wanted
            return calls.replay(num_tokens, num_rows, len(wanted))[: len(wanted)]
        except Exception:  # noqa: BLE001  whatever it is
            hidden = self._call_by_call(token_ids, positions, step)  # fails if rows are bad
            if self._failures.note():
                self._calls = None
            return hidden

    def _call_by_call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """The memory plan counts the arena or what this takes, whichever is more."""
        if self._max_tokens:
            self._arena.give_back()
        return self._model.forward(token_ids, positions, step)

    def _capture(self) -> SizedCalls | None:
        largest = (self._max_tokens, self._max_rows, self._max_tokens)
        try:
            return capture_sizes(self._team, self._arena, self._compute, largest)
        except ArenaFullError as error:
            _log.warning("steps of prompts are computed call by call: %s", error)
        except NotCapturableError as error:
            _log.info("steps of prompts are computed call by call: %s", error)
        except Exception:  # noqa: BLE001  it may well compute the rows of requests
            _log.warning("steps of prompts are computed call by call", exc_info=True)
        return None

    def _compute(self, num_tokens: int, num_rows: int, num_wanted: int) -> torch.Tensor:
        batch = self._batch.of_size(num_tokens, num_rows)
        starts, wanted = self._starts[: num_rows + 1], self._wanted[:num_wanted]
        step = self._inputs.step_of(batch, starts, num_tokens, self._inputs.longest, wanted)
        return self._model.forward(batch.token_ids, batch.positions, step)
