"""Steps in which every row computes one token and draws the next: what decoding is made of."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from quire.models import CausalLM
from quire.runner.decode_inputs import DecodeInputs
from quire.runner.device_draws import DeviceDraws
from quire.runner.device_state import DeviceState
from quire.runner.graph_recorder import Graph, GraphRecorder
from quire.runner.inbox import RowList
from quire.runner.lazy_graphs import LazyGraphs
from quire.runner.rows import ScheduledRows

__all__ = ["UniformGraph", "UniformSteps"]

_log = logging.getLogger("quire.runner")


@dataclass(frozen=True, slots=True)
class UniformGraph:
    """token_ids: int32 [rows], where a replay leaves them."""

    graph: Graph
    token_ids: torch.Tensor


class UniformSteps:
    """From the rows' slots to their next tokens without a number of the host's in between, so that
    the whole of it is one graph per number of rows."""

    def __init__(
        self,
        model: CausalLM,
        inputs: DecodeInputs,
        state: DeviceState,
        draws: DeviceDraws,
        graphs: LazyGraphs[UniformGraph],
        recorder: GraphRecorder | None,
    ) -> None:
        """recorder: None to record nothing."""
        self.graphs = graphs
        self._recorder = recorder
        self._model = model
        self._inputs = inputs
        self._state = state
        self._draws = draws
        self._starts = np.arange(state.spare + 1, dtype=np.int32)

    def serves(self, rows: ScheduledRows) -> bool:
        """Whether these rows make such a step."""
        return bool(
            len(rows.slots)
            and rows.samples.all()
            and (rows.num_tokens == 1).all()
            and self._draws.is_graphable(rows.slots)
        )

    def launch(self, rows: ScheduledRows) -> torch.Tensor | None:
        """Token ids int32 [R] of rows that have them then; None if an exception was raised: whose
        fault it is, another way has to find out."""
        num_rows = len(rows.slots)
        self._state.send(RowList(rows.slots, self._starts[: num_rows + 1], rows.slots))
        try:
            return self._token_ids(num_rows)
        except Exception:  # noqa: BLE001  whoever is at fault, another way finds out
            _log.warning("a decode step failed and is computed anew", exc_info=True)
            return None

    def _token_ids(self, num_rows: int) -> torch.Tensor:
        """Of the first rows in the inbox; those up to the size of a graph are the spare one."""
        size = self.graphs.size_for(num_rows) if self._recorder is not None else None
        if size is None:
            return self._compute(num_rows)
        known = self.graphs.get(size, self._record)
        if known is None:
            return self._compute(size)[:num_rows]
        known.graph.replay()
        return known.token_ids[:num_rows].clone()  # the next replay writes there again

    def _record(self, size: int) -> UniformGraph:
        assert self._recorder is not None
        self._recorder.begin()
        try:
            token_ids = self._compute(size)
        except BaseException:
            self._recorder.abandon()
            raise
        return UniformGraph(self._recorder.end(), token_ids)

    def _compute(self, num_rows: int) -> torch.Tensor:
        """Of the first rows in the inbox."""
        inputs = self._inputs.gather(num_rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.step)
        logits = self._model.logits(hidden)
        return self._draws.draw_and_append(logits, self._state.inbox.slots[:num_rows])
