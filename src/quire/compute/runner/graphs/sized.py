"""The forward of any tokens, captured for machines where a replay may be told their number."""

from __future__ import annotations

import logging

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import StateTaps
from quire.compute.layers.token_columns import Variant
from quire.compute.models import CausalLM
from quire.compute.runner.inputs import BatchBuffers, InputGatherer
from quire.ops.native.capture import ArenaFullError, CaptureArena, SizedCalls, capture_sizes
from quire.ops.native.replay import NotCapturableError
from quire.ops.native.team import Team

__all__ = ["SizedGraph"]

_log = logging.getLogger("quire.runner")


class SizedGraph:
    """`MixedGraphs` for steps of up to `max_tokens` tokens and `max_rows` rows. The rows and the
    wanted tokens are read from buffers that stay in place; their numbers are arguments of a
    replay."""

    def __init__(
        self,
        model: CausalLM,
        inputs: InputGatherer,
        team: Team,
        arena: CaptureArena,
        max_tokens: int,
        max_rows: int,
        taps: StateTaps | None = None,
    ) -> None:
        """team: threads that compute the model's kernels. taps: readers of the model's states.
        Raises NotCapturableError for a model that does more than call kernels, or needs more than
        the arena has."""
        self._model = model
        self._inputs = inputs
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._batch = inputs.buffers(max_tokens, max_rows)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._wanted = torch.zeros(max_tokens, dtype=torch.int64)
        self._arena, self._taps = arena, taps
        self._tapped: dict[Variant, tuple[torch.Tensor, ...]] = {}
        largest = (max_tokens, max_rows, max_tokens)
        self.calls: dict[Variant, SizedCalls] = {}
        for variant in inputs.variants:
            inputs.choose(variant)
            self.calls[variant] = capture_sizes(team, arena, self._compute, largest)

    @classmethod
    def captured(
        cls,
        model: CausalLM,
        inputs: InputGatherer,
        team: Team,
        arena: CaptureArena,
        max_tokens: int,
        max_rows: int,
        taps: StateTaps | None = None,
    ) -> SizedGraph | None:
        """The graph, or None if there can be none; the log says why."""
        try:
            return cls(model, inputs, team, arena, max_tokens, max_rows, taps)
        except ArenaFullError as error:
            _log.warning("steps of prompts are computed call by call: %s", error)
        except NotCapturableError as error:
            _log.info("steps of prompts are computed call by call: %s", error)
        except Exception:  # noqa: BLE001  it may well compute the rows of requests
            _log.warning("steps of prompts are computed call by call", exc_info=True)
        return None

    def batch(self, num_tokens: int, num_rows: int) -> BatchBuffers | None:
        if num_tokens > self._max_tokens or num_rows > self._max_rows:
            return None
        return self._batch.of_size(num_tokens, num_rows)

    def replay(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor | None:
        del positions  # they lie beside the token ids
        if token_ids.data_ptr() != self._batch.token_ids.data_ptr():
            return None
        num_tokens, num_rows = len(token_ids), len(step.seq_lens)
        wanted = torch.arange(num_tokens) if step.wanted_tokens is None else step.wanted_tokens
        self._starts[: num_rows + 1] = step.query_start_loc
        self._wanted[: len(wanted)] = wanted
        variant = self._inputs.variant
        hidden = self.calls[variant].replay(num_tokens, num_rows, len(wanted))[: len(wanted)]
        if self._taps is not None:
            self._taps.put([state[:num_tokens] for state in self._tapped[variant]])
        return hidden

    def _compute(self, num_tokens: int, num_rows: int, num_wanted: int) -> torch.Tensor:
        batch = self._batch.of_size(num_tokens, num_rows)
        starts, wanted = self._starts[: num_rows + 1], self._wanted[:num_wanted]
        step = self._inputs.step_of(batch, starts, num_tokens, self._inputs.longest, wanted)
        hidden = self._model.forward(batch.token_ids, batch.positions, step)
        if self._taps is not None:  # the largest sizes come first; others lie in the same place
            states = tuple(self._arena.borrowed(state) for state in self._taps.take())
            self._tapped.setdefault(self._inputs.variant, states)
        return hidden
