"""Mixed steps: rows compute any number of tokens; what repeats of their forward is replayed."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import GivenEmbeddings
from quire.compute.models import CausalLM
from quire.compute.runner.graphs.failures import ReplayFailures
from quire.compute.runner.inputs import BatchBuffers, InputGatherer, ModelInputs
from quire.compute.runner.rows import ScheduledRows
from quire.ops.native.capture import CaptureArena

__all__ = ["MixedGraphs", "MixedSteps"]


class MixedGraphs(Protocol):
    """Graphs of a model's forward over any rows."""

    def batch(self, num_tokens: int, num_rows: int) -> BatchBuffers | None:
        """Return the buffers from which graphs read a batch of so many tokens and rows; None if
        none does."""
        ...

    def replay(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor | None:
        """Run a graph in place of `CausalLM.forward`. The result is valid until the next call; None
        if no graph reads these tensors, or there is none yet."""
        ...


class MixedSteps:
    """A `Computes` that replays the graphs that exist and computes everything else call by call."""

    def __init__(
        self,
        model: CausalLM,
        inputs: InputGatherer,
        graphs: MixedGraphs | None,
        given: GivenEmbeddings,
        arena: CaptureArena | None = None,
        *,
        has_ranks: bool = False,
    ) -> None:
        """given: the model's embeddings of requests; steps that have some are computed call by
        call. arena: memory of the graphs, if a step that is computed without them may use it; the
        memory plan counts the larger need of the two. has_ranks: other ranks compute the same
        steps, and must learn of a failed replay before anything is computed again."""
        self.graphs = graphs
        self.failures = ReplayFailures("steps of prompts")
        self._model = model
        self._inputs = inputs
        self._given = given
        self._arena = arena
        self._has_ranks = has_ranks
        self.logits = model.logits

    def build(self, rows: ScheduledRows) -> ModelInputs:
        """The inputs of a step, where its graph reads them."""
        num_tokens, num_rows = int(rows.num_tokens.sum()), len(rows.slots)
        batch = None if self.graphs is None else self.graphs.batch(num_tokens, num_rows)
        if batch is None:
            batch = self._inputs.buffers(num_tokens, num_rows, empty=True)
        return self._inputs.fill(rows, batch)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """Run a forward, by a graph if there is one; the result is valid until the next call."""
        if step.given is not None:
            with self._given.within(step.given):
                return self._call_by_call(token_ids, positions, step)
        if self.graphs is None or positions.dim() > 1 or self._inputs.are_apart:
            return self._call_by_call(token_ids, positions, step)
        try:
            hidden = self.graphs.replay(token_ids, positions, step)
        except Exception:
            if self._has_ranks:
                self.graphs = None
                raise
            hidden = self._call_by_call(token_ids, positions, step)  # fails if rows are bad
            if self.failures.note():
                self.graphs = None
            return hidden
        return self._call_by_call(token_ids, positions, step) if hidden is None else hidden

    def _call_by_call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        if self._arena is not None:
            self._arena.give_back()
        return self._model.forward(token_ids, positions, step)
