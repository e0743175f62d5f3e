"""Graphs of what stands between attentions, for machines whose graphs have one size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from quire.compute.attention import StepInputs
from quire.compute.attention.splittable import AttentionCall, SplittableAttention
from quire.compute.models import CausalLM
from quire.compute.runner.graphs.ladder import LazyGraphs
from quire.compute.runner.graphs.recorder import Graph, GraphRecorder
from quire.compute.runner.inputs import BatchBuffers, InputGatherer

__all__ = ["MAX_TOKENS", "PieceGraphs", "Pieces"]

MAX_TOKENS = 512
"""Steps with more tokens than this keep a device busy longer than the host needs to launch them, so
graphs would gain nothing."""


@dataclass(frozen=True, slots=True)
class _Attended:
    """A graph, the attention that follows it, and where the next graph reads its result."""

    graph: Graph
    call: AttentionCall
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """A forward in pieces. hidden: [T, E], where the last piece leaves it."""

    attended: tuple[_Attended, ...]
    last: Graph
    hidden: torch.Tensor


class PieceGraphs:
    """`MixedGraphs` of the code between attention calls. The work of attention depends on the rows
    of a step, so attention is called each time. All other work depends on the number of tokens
    alone, which is padded to the size of a graph."""

    def __init__(
        self,
        model: CausalLM,
        inputs: InputGatherer,
        attention: Sequence[SplittableAttention],
        graphs: LazyGraphs[Pieces],
        recorder: GraphRecorder,
    ) -> None:
        """attention: backend of each layer group of the model."""
        self._model = model
        self._inputs = inputs
        self._attention = tuple(attention)
        self.graphs = graphs
        self._recorder = recorder
        self._batches: dict[int, BatchBuffers] = {}

    def batch(self, num_tokens: int, num_rows: int) -> BatchBuffers | None:
        size = self.graphs.size_for(num_tokens)
        if size is None:
            return None
        if size not in self._batches:
            self._batches[size] = self._inputs.buffers(size, 0)
        fresh = self._inputs.buffers(0, num_rows, empty=True)  # attention alone reads these
        return replace(self._batches[size], seq_lens=fresh.seq_lens, tables=fresh.tables)

    def replay(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor | None:
        size = len(token_ids)
        if size not in self._batches or token_ids is not self._batches[size].token_ids:
            return None
        known = self.graphs.get(size, lambda _: self._record(token_ids, positions, step))
        if known is None:
            return None
        for each in known.attended:
            each.graph.replay()
            each.result.copy_(self._attention[each.call.group].compute(each.call, step))
        known.last.replay()
        wanted = step.wanted_tokens
        return known.hidden if wanted is None else known.hidden[wanted]

    def _record(self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> Pieces:
        recorder, attended = self._recorder, list[_Attended]()
        queries: list[torch.Tensor] = []
        results: list[torch.Tensor] = []

        def split(call: AttentionCall) -> torch.Tensor:
            # Layers share a place for their queries: else q, k and v of each would stay.
            query = _place(call.q, call.q.shape[-1], queries).copy_(call.q)
            graph = recorder.end()
            result = _place(call.q, call.cache.v.shape[-1], results)
            attended.append(_Attended(graph, replace(call, q=query), result))
            recorder.begin()
            return result

        # The number of wanted tokens differs from step to step.
        step = replace(step, wanted_tokens=None)
        recorder.begin()
        try:
            with ExitStack() as answers:
                for each in dict.fromkeys(self._attention):
                    answers.enter_context(each.answered_by(split))
                hidden = self._model.forward(token_ids, positions, step)
            return Pieces(tuple(attended), recorder.end(), hidden)
        except BaseException:
            recorder.abandon()
            raise


def _place(q: torch.Tensor, width: int, known: list[torch.Tensor]) -> torch.Tensor:
    """One of `known` of the tokens and heads of q [T, H, D], [T, H, width]; it joins them if it is
    new."""
    shape = (*q.shape[:2], width)
    for each in known:
        if each.shape == shape:
            return each
    known.append(q.new_empty(shape))
    return known[-1]
