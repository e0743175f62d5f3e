"""Decode graphs: steps in which every row computes one token and samples the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from quire.base.errors import EngineLostError
from quire.compute.models import CausalLM
from quire.compute.runner.drafting.states import KeptStates
from quire.compute.runner.draws import GraphDraws
from quire.compute.runner.graphs.failures import ReplayFailures
from quire.compute.runner.graphs.ladder import LazyGraphs
from quire.compute.runner.graphs.recorder import Graph, GraphRecorder
from quire.compute.runner.inputs import InputGatherer
from quire.compute.runner.rows import ScheduledRows, Slots
from quire.compute.sampling import RowsOfMasks
from quire.ops.distributed import ALONE, Collectives, together
from quire.protocol.step import IntArray, TokenLogprobs

__all__ = ["DecodeGraph", "DecodeSteps", "Decoded"]

_log = logging.getLogger("quire.runner")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Result of a decode step. If it has drawn: token ids int32 [R], which the rows have appended;
    -1 in rows that fail. Else: logits float32 [R, V], which must be read before the next step."""

    logits: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """result: token ids or logits of all its rows; a replay overwrites them. states: states of its
    forward to keep; a replay overwrites them too, and the logits that token ids were drawn from."""

    graph: Graph
    result: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()
    drawn_from: torch.Tensor | None = None


class DecodeSteps:
    """Decode steps that go from the rows' slots to their next tokens without the host in between.
    One graph per number of rows holds a whole step, whichever rows they are. drawing: graphs that
    include the draw, for rows that ask for nothing else, or for raw log-probabilities beside it.
    logits: graphs that end before the draw, for all other rows; None leaves those to a mixed
    step."""

    def __init__(
        self,
        model: CausalLM,
        inputs: InputGatherer,
        slots: torch.Tensor,
        draws: GraphDraws,
        drawing: LazyGraphs[DecodeGraph],
        logits: LazyGraphs[DecodeGraph] | None,
        recorder: GraphRecorder | None,
        *,
        has_spare_row: bool,
        collectives: Collectives = ALONE,
        kept: KeptStates | None = None,
    ) -> None:
        """slots: tensor from which `inputs` reads the rows that compute. recorder: None with empty
        ladders. has_spare_row: rows are padded to the size of a graph, also where they are computed
        without one, since sums of another size may round differently. collectives: connection to
        the ranks that compute the same rows. kept: keeps states of the steps that graphs compute.
        """
        self.drawing = drawing
        self.logits = logits
        self.failures = ReplayFailures("decode steps")
        self._model = model
        self._inputs = inputs
        self._slots = slots
        self._draws = draws
        self._recorder = recorder
        self._has_spare_row = has_spare_row
        self._collectives = collectives
        self._kept = kept
        self._recorded: tuple[torch.Tensor, ...] = ()  # states of the forward being recorded
        self._drawn_from: torch.Tensor | None = None  # logits of it
        self._replayed: tuple[torch.Tensor, ...] = ()
        self._last: tuple[DecodeGraph, IntArray] | None = None

    def compute(self, rows: ScheduledRows, positions: Slots, *, draws: bool) -> Decoded | None:
        """Compute rows [R]. Return None if the caller must compute them another way: the rows are
        of another kind, or the attempt failed, and the other way will find the row at fault.

        positions: int64 [R], of the tokens that these rows draw. draws: whether to draw the tokens,
        if no row asks for more.
        """
        self._last = None
        if not rows.samples.all() or (rows.num_tokens != 1).any():
            return None
        draws = self._draws.prepare(rows.slots, positions) and draws
        num_rows = len(rows.slots)
        if not (draws and self._has_spare_row) and self._size_of_logits(num_rows) is None:
            return None
        self._inputs.send(rows)
        if self._inputs.are_apart:
            return None
        try:
            return self._on_all_ranks(
                lambda: (self._draw(num_rows) if draws else None) or self._logits(num_rows)
            )
        except EngineLostError:
            raise
        except Exception:  # noqa: BLE001  as above
            _log.warning("a decode step failed and is computed anew", exc_info=True)
            return None

    def keep_states(self, slots: Slots) -> None:
        """Keep what is to be kept of the step that was computed last, of rows `slots` [R], which
        have counted it. Before another one."""
        if self._kept is not None:
            states = tuple(state[: len(slots)] for state in self._replayed)
            self._kept.keep_decoded(slots, states)

    @property
    def may_draw_masked(self) -> bool:
        """True if `draw_masked` may follow the last `compute`, which has given logits."""
        return self._draws.may_draw_masked

    def draw_masked(self, logits: torch.Tensor, masks: RowsOfMasks) -> IntArray | None:
        """Draw from the logits of the last `compute`, under the masks of the rows that have one.
        Return the token ids [R]. Return None, and leave all rows as they are, if one of them has no
        token."""
        token_ids = self._draws.under_masks(logits, self._slots[: len(logits)], masks)
        return None if token_ids is None else token_ids.numpy()

    def read_logprobs(self, token_ids: IntArray) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return the log-probabilities that rows asked for of the tokens [R] that a graph on the
        host has just drawn, by slot."""
        if self._last is None or self._last[0].drawn_from is None:
            return {}
        return self._draws.read_logprobs(self._last[0].drawn_from, token_ids)

    def repeat(self) -> IntArray:
        """Replay the last step, if a graph on the host has drawn in it: each of its rows goes on by
        one token. Return token ids as in `Decoded`.
        Raises EngineError if a kernel fails; then no row has changed."""
        assert self._last is not None
        known, token_ids = self._last
        self._on_all_ranks(lambda: self._replay(known))
        return token_ids

    def _on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run `work` on all ranks and return its result, like `together`. A rank that has drawn
        cannot undo it, so if another rank fails their rows would differ.
        Raises EngineLostError then."""
        is_done = False

        def attempt() -> Result:
            nonlocal is_done
            result = work()
            is_done = True
            return result

        try:
            return together(self._collectives, attempt)
        except Exception as error:
            if is_done:
                raise EngineLostError("ranks have drawn different tokens: start anew") from error
            raise

    def _draw(self, num_rows: int) -> Decoded | None:
        """Tokens of the rows that were sent; None if only a graph could draw them and there is
        none."""
        known = self._graph(self.drawing, num_rows, self._compute_and_draw)
        if known is not None:
            self._replay(known)
        if self._has_spare_row:
            if known is not None:  # the next replay writes there again
                return Decoded(token_ids=known.result[:num_rows].clone())
            size = self.drawing.size_for(num_rows) or num_rows
            return Decoded(token_ids=self._compute_and_draw(size)[:num_rows])
        if known is None:
            return None
        self._last = known, known.result.numpy()
        return Decoded(token_ids=known.result)

    def _logits(self, num_rows: int) -> Decoded | None:
        """Logits of the rows that were sent; None if there is no graph for them."""
        if self.logits is None:
            return None
        known = self._graph(self.logits, num_rows, self._compute)
        if known is None:
            return None
        self._replay(known)
        return Decoded(known.result[:num_rows])

    def _size_of_logits(self, num_rows: int) -> int | None:
        return None if self.logits is None else self.logits.size_for(num_rows)

    def _graph(
        self,
        graphs: LazyGraphs[DecodeGraph],
        num_rows: int,
        compute: Callable[[int], torch.Tensor],
    ) -> DecodeGraph | None:
        size = graphs.size_for(num_rows)
        if size is None:
            return None
        return graphs.get(size, lambda size: self._record(size, compute), self._inputs.variant)

    def _record(self, size: int, compute: Callable[[int], torch.Tensor]) -> DecodeGraph:
        recorder = self._recorder
        assert recorder is not None, "there are no sizes to record"
        recorder.begin()
        try:
            result = recorder.result_of(compute(size))
            states = tuple(recorder.result_of(state) for state in self._recorded)
            logits = self._drawn_from
            logits = None if logits is None else recorder.result_of(logits)
        except BaseException:
            recorder.abandon()
            raise
        finally:
            self._recorded, self._drawn_from = (), None
        return DecodeGraph(recorder.end(), result, states, logits)

    def _replay(self, known: DecodeGraph) -> None:
        self._replayed = known.states
        try:
            known.graph.replay()
        except Exception:
            if self.failures.note():
                self.drawing.end()
                if self.logits is not None:
                    self.logits.end()
            raise

    def _compute(self, num_rows: int) -> torch.Tensor:
        """Logits of the first rows that were sent."""
        inputs = self._inputs.decode(num_rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.step)
        if self._kept is not None:  # held until the end, so that nothing is written over them
            taps = self._kept.taps
            self._recorded = (hidden,) if taps is None else taps.take()
        return self._model.logits(hidden)

    def _compute_and_draw(self, num_rows: int) -> torch.Tensor:
        """Token ids of the first rows that were sent."""
        with self._draws.logits_as_drawn():
            logits = self._compute(num_rows)
        if not self._has_spare_row:  # held until the end of a recording, like states
            self._drawn_from = logits
        return self._draws(logits, self._slots[:num_rows])
