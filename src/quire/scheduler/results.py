"""Takes in what steps computed: tokens, log-probabilities, failures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.step import StepResult
from quire.scheduler.beams import BeamIntake
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.sequence import Sequence, is_stop
from quire.scheduler.state import SchedulerState

__all__ = ["ResultIntake"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was planned and whose result has not been applied.

    generation, starts, sequences: by slot, as of the plan; `starts` are the computed counts before
        the step. A sequence whose results are not wanted any more is struck off `sequences`.
    mark: what this step's rows publish has this mark or a later one (`KVManager.mark`).
    swapped_in: slots whose blocks came from the host with this step.
    """

    step_id: int
    generation: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sequences: list[Sequence | None]
    mark: int
    swapped_in: frozenset[int] = frozenset()


class ResultIntake:
    """Knows the steps in flight, oldest first, and applies their results in this order."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle, beams: BeamIntake) -> None:
        self._table = state.table
        self._kv = state.kv
        self._prefixes = state.prefixes
        self._recovery = state.recovery
        self._outputs = state.outputs
        self._lifecycle = lifecycle
        self._beams = beams
        self._in_flight: deque[InFlight] = deque()

    def expect(self, step_id: int, starts: Slots, mark: int) -> None:
        """A step was planned; its result comes after those of all steps before it. starts, mark:
        see `InFlight`."""
        table = self._table
        step = InFlight(
            step_id,
            table.generation.copy(),
            starts,
            table.sequences.copy(),
            mark,
            self._recovery.slots_swapped_in(),
        )
        self._in_flight.append(step)

    def apply(self, result: StepResult) -> None:
        """Take in the oldest planned step's result. EngineError if it is another step's."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise EngineError(f"result of step {result.step_id} arrived, {step.step_id} was due")
        if result.failed:
            self._fail_rows(step, result)
        self._kv.settle(self._in_flight[0].mark if self._in_flight else self._kv.mark())
        if result.logprobs or result.prompt_logprobs:
            self._take_logprobs(step, result)
        slots, tokens = result.slots.astype(np.int64), result.token_ids
        alive = step.generation[slots] == self._table.generation[slots]
        if not alive.all():
            self._append_departed(step, result, ~alive)
            slots, tokens = slots[alive], tokens[alive]
        self._append(slots, tokens)
        for slot, candidates in result.candidates.items():
            if step.generation[slot] == self._table.generation[slot]:
                self._beams.take(self._table.at(slot), candidates)

    def _append(self, slots: Slots, tokens: npt.NDArray[np.int32]) -> None:
        table = self._table
        ends = table.num_known[slots]
        table.token_ids[slots, ends] = tokens
        ends += 1
        table.num_known[slots] = ends
        self._outputs.tokens(table.handle[slots], tokens)
        self._prefixes.publish(slots)
        stopped = table.stops(slots, tokens)
        ended = stopped | (ends >= table.max_total[slots])
        for i in ended.nonzero()[0].tolist():
            sequence = table.at(int(slots[i]))
            stop = int(tokens[i]) if stopped[i] else None
            self._lifecycle.finish(sequence, self._ended(sequence, stop))

    def _ended(self, sequence: Sequence, stop_token_id: int | None) -> SequenceFinish:
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        return SequenceFinish(sequence.handle, reason, stop_token_id)

    def _take_logprobs(self, step: InFlight, result: StepResult) -> None:
        """By slot to by handle, for the sequences that have not ended."""
        for slot, entry in result.logprobs.items():
            if (handle := self._handle_of(step, slot)) is not None:
                self._outputs.logprobs(handle, entry)
        for slot, piece in result.prompt_logprobs.items():
            if (handle := self._handle_of(step, slot)) is not None:
                self._outputs.prompt_logprobs(handle, piece)

    def _handle_of(self, step: InFlight, slot: int) -> int | None:
        """Whose row this slot was in that step, if it is live or was preempted meanwhile."""
        if step.generation[slot] == self._table.generation[slot]:
            return int(self._table.handle[slot])
        sequence = step.sequences[slot]
        return sequence.handle if sequence is not None and sequence.num_pending else None

    def _append_departed(
        self, step: InFlight, result: StepResult, gone: npt.NDArray[np.bool_]
    ) -> None:
        """Tokens of sequences that were preempted while their step was in flight still count."""
        for i in np.flatnonzero(gone):
            sequence = step.sequences[int(result.slots[i])]
            if sequence is not None and sequence.num_pending:
                sequence.num_pending -= 1
                self._append_to(sequence, int(result.token_ids[i]))

    def _append_to(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
        self._outputs.tokens(np.array([sequence.handle]), np.array([token], np.int32))
        request = sequence.group.request
        num_output = len(sequence.token_ids) - len(request.prompt_token_ids)
        if is_stop(request, token, num_output):
            self._lifecycle.finish(sequence, self._ended(sequence, token))
        elif len(sequence.token_ids) >= sequence.group.max_total_tokens:
            self._lifecycle.finish(sequence, self._ended(sequence, None))

    def _fail_rows(self, step: InFlight, result: StepResult) -> None:
        """Fail the requests of failed rows. What was published since the step was planned may be
        garbage and is taken back; sequences that may have read it are computed again."""
        self._kv.retract(step.mark)
        for failure in sorted(result.failed, key=lambda f: int(step.starts[f.slot])):
            sequence = step.sequences[failure.slot]
            if sequence is None:
                continue  # it failed because it read the blocks of a row that failed before it
            start = 0 if failure.slot in step.swapped_in else int(step.starts[failure.slot])
            bad_block = start // self._kv.block_size
            if len(sequence.names) > bad_block:
                self._distrust(step, sequence, bad_block)
            if sequence in sequence.group.sequences:
                self._lifecycle.fail(sequence.group, failure.message)

    def _distrust(self, step: InFlight, failed: Sequence, bad_block: int) -> None:
        """Compute again whoever has the block at index `bad_block` of a failed sequence, by name:
        a sliding group may have read and released it."""
        steps = (step, *self._in_flight)
        name = failed.names[bad_block]
        readers = {
            sequence.group.number: sequence.group
            for each in steps
            for sequence in each.sequences
            if sequence is not None
            and sequence.group is not failed.group
            and sequence.names[bad_block : bad_block + 1] == [name]
        }
        for group in readers.values():
            if group.has_slots:
                self._lifecycle.preempt(group, may_swap=False)
            self._recovery.forget(group)
            for sequence in group.sequences:
                sequence.num_pending = 0
            for each in steps:
                each.sequences[:] = [
                    None if s is not None and s.group is group else s for s in each.sequences
                ]

    def lose_all(self) -> None:
        """The steps in flight never happened: nobody waits for their tokens."""
        for step in self._in_flight:
            for sequence in step.sequences:
                if sequence is not None:
                    sequence.num_pending = 0  # drawn again, and the same: noise has no state
        self._in_flight.clear()
