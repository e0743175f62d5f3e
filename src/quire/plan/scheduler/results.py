"""Takes in what steps computed: tokens, log-probabilities, failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.plan.scheduler.beams.intake import BeamIntake
from quire.plan.scheduler.constraints.tails import TailRewinds
from quire.plan.scheduler.constraints.unsent import Verdict
from quire.plan.scheduler.drafts import ChosenDrafts
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.status import PreemptionCause
from quire.protocol.step import FloatArray, IntArray, RowTokens, StepResult, TokenLogprobs

__all__ = ["ResultIntake"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was planned and whose result has not been applied.

    generation, starts, sequences: state of each slot when the step was planned; `starts` are the
        computed counts before the step, corrected by the tokens that earlier steps did not accept.
        A sequence whose results are not wanted any more is struck off `sequences`.
    dropped: slots that compute with a token that was refused, with the generation that they had;
        what they are given is refused too.
    drafts: number of drafts that the step verifies, by slot; None if it verifies none. are_forced:
        whether the drafts are certain instead of guesses.
    mark: earliest mark of the blocks that this step's rows publish (`KVManager.mark`).
    swapped_in: slots whose blocks came from the host with this step.
    """

    step_id: int
    generation: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sequences: list[Sequence | None]
    mark: int
    swapped_in: frozenset[int] = frozenset()
    drafts: Slots | None = None
    are_forced: bool = False
    dropped: dict[int, int] = field(default_factory=dict[int, int])

    def num_drafts(self, slot: int) -> int:
        """Drafts that this slot verifies."""
        return 0 if self.drafts is None else int(self.drafts[slot])


class ResultIntake:
    """Tracks the steps in flight, oldest first, and applies their results in this order."""

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        beams: BeamIntake,
        on_verified: Callable[[Slots, int, Slots, Slots], None],
    ) -> None:
        """on_verified: told of slots [R], how many drafts were planned of all rows of their step,
        how many each slot had, and how many of these were right."""
        self._table = state.table
        self._kv = state.kv
        self._prefixes = state.prefixes
        self._states = state.states
        self._recovery = state.recovery
        self._outputs = state.outputs
        self._lifecycle = lifecycle
        self._beams = beams
        self._on_verified = on_verified
        self._unsent = state.unsent
        self._rewinds = TailRewinds(state)
        self._in_flight: deque[InFlight] = deque()
        self._last_applied = -1
        self._ended = set[int]()  # slots of watched sequences, in the step that is being applied

    def expect(self, step_id: int, starts: Slots, mark: int, drafts: ChosenDrafts) -> None:
        """A step was planned; its result comes after those of all steps before it. starts, mark:
        see `InFlight`."""
        table = self._table
        counts = None
        if len(drafts.slots):
            counts = np.zeros(len(starts), np.int64)
            counts[drafts.slots] = drafts.counts
        step = InFlight(
            step_id,
            table.generation.copy(),
            starts,
            table.sequences.copy(),
            mark,
            self._recovery.slots_swapped_in(),
            counts,
            drafts.are_forced,
        )
        self._in_flight.append(step)

    @property
    def oldest(self) -> int | None:
        """The step whose result comes next."""
        return self._in_flight[0].step_id if self._in_flight else None

    def apply(self, result: StepResult) -> None:
        """Take in the oldest planned step's result. EngineError if it is another step's."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise EngineError(f"result of step {result.step_id} arrived, {step.step_id} was due")
        self._last_applied = step.step_id
        if self._ended:
            self._ended.clear()
        if result.failed:
            self._fail_rows(step, result)
        self._kv.settle(self._in_flight[0].mark if self._in_flight else self._kv.mark())
        for slot, piece in result.prompt_logprobs.items():
            if (handle := self._handle_of(step, slot)) is not None:
                self._outputs.prompt_logprobs(handle, piece)
        slots = result.slots.astype(np.int64)
        alive = step.generation[slots] == self._table.generation[slots]
        is_plain = result.counts is None and step.drafts is None and not result.logprobs
        if is_plain and alive.all():
            self._append(slots, result.token_ids)
        else:
            self._take_tokens(step, result, alive)
        for slot, candidates in result.candidates.items():
            if step.generation[slot] == self._table.generation[slot]:
                (of_next,) = candidates  # beams have no drafts
                self._beams.take(self._table.at(slot), of_next)
        for slot, vector in result.vectors.items():
            self._take_vector(step, slot, vector)
        self._rewinds.settle(step.step_id)

    def _take_vector(self, step: InFlight, slot: int, vector: FloatArray) -> None:
        """End a sequence that pools, whether or not it was preempted meanwhile."""
        sequence = step.sequences[slot]
        if sequence is not None and sequence in sequence.group.sequences:
            self._outputs.vector(sequence.handle, vector)
            self._lifecycle.finish(sequence, SequenceFinish(sequence.handle, FinishReason.STOP))

    def _take_tokens(
        self, step: InFlight, result: StepResult, alive: npt.NDArray[np.bool_]
    ) -> None:
        """Any number of tokens per row; alive: [R], which rows still have their slots."""
        given = result.drawn
        if step.dropped:
            self._count_dropped(step, given)
        if not alive.all():
            self._append_departed(step, given.select(~alive), result.logprobs)
            given = given.select(alive)
        if step.drafts is not None:
            made = step.drafts
            if result.num_drafts is not None:
                made = step.drafts.copy()
                made[result.slots] = result.num_drafts
            self._rewind(step, given.slots, made[given.slots], given.counts)
        self._append_in_turn(given, result.logprobs)

    def _count_dropped(self, step: InFlight, given: RowTokens) -> None:
        """Tell the rewinds which tokens their rows were given; another sequence may have had the
        slot then."""
        for slot, count in zip(given.slots.tolist(), given.counts.tolist(), strict=True):
            if step.dropped.get(slot) == self._table.generation[slot]:
                self._rewinds.count([slot], [count])

    def _rewind(self, step: InFlight, slots: Slots, made: Slots, counts: Slots) -> None:
        """Take back the counts of drafts of a step that were not accepted. made: drafts that the
        rows have verified."""
        assert step.drafts is not None
        drafted = step.drafts[slots]
        rows = drafted > 0
        slots, drafted, rejected = slots[rows], drafted[rows], (drafted + 1 - counts)[rows]
        if not step.are_forced:
            self._on_verified(slots, int(step.drafts.sum()), made[rows], drafted - rejected)
        self._table.rewind(slots, drafted, rejected)
        self._kv.give_back(slots, self._table.num_computed[slots])
        if self._states is not None:
            self._states.reached(slots, step.starts[slots] + 1 + drafted - rejected)
        for later in self._in_flight:
            later.starts[slots] -= rejected  # of the same sequences: they are alive

    def _drop(self, sequence: Sequence) -> int:
        """Ignore what steps in flight compute for a sequence. Return the last of these steps."""
        for step in self._in_flight:
            for slot, each in enumerate(step.sequences):
                if each is sequence:
                    step.dropped.setdefault(slot, int(step.generation[slot]))
                    step.generation[slot] = -1
        return self._in_flight[-1].step_id if self._in_flight else self._last_applied

    def _append_in_turn(
        self, given: RowTokens, logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    ) -> None:
        """Append the first token of each row, then the second of the rows that go on, and so forth,
        so that every rule sees one token at a time. Tokens after the end of a sequence are
        dropped."""
        table, slots, starts = self._table, given.slots, given.starts
        num_turns = int(given.counts.max(initial=0))
        generation = table.generation[slots]
        for turn in range(num_turns):
            if turn:
                rows = (given.counts > turn) & (table.generation[given.slots] == generation)
                if self._ended:
                    is_over = rows & np.isin(given.slots, list(self._ended))
                    self._rewinds.count(given.slots[is_over].tolist(), [1] * int(is_over.sum()))
                    rows &= ~is_over
                slots, starts = given.slots[rows], given.starts[rows]
            if logprobs:
                self._give_logprobs_of(slots, logprobs, turn)
            self._append(slots, given.token_ids[starts + turn])

    def _append(self, slots: Slots, tokens: npt.NDArray[np.int32]) -> None:
        """Append a token to each of these distinct slots [R]."""
        table = self._table
        ends = table.num_known[slots]
        table.token_ids[slots, ends] = tokens
        ends += 1
        table.num_known[slots] = ends
        self._give(slots, tokens)
        self._prefixes.publish(slots)
        if self._states is not None:
            self._states.give_names()
        for i in table.may_end(slots, tokens).nonzero()[0].tolist():
            slot = int(slots[i])
            self._end_if_due(table.at(slot), table.known_tokens(slot))

    def _give(self, slots: Slots, tokens: IntArray) -> None:
        """Send tokens [R] to the clients of `slots` [R], but for those that wait for verdicts."""
        table = self._table
        if table.has_watched:
            is_watched = table.is_watched[slots]
            for i in is_watched.nonzero()[0].tolist():
                self._unsent.append(table.at(int(slots[i])), int(tokens[i]))
            slots, tokens = slots[~is_watched], tokens[~is_watched]
        self._outputs.tokens(table.handle[slots], tokens)

    def _give_logprobs_of(
        self, slots: Slots, logprobs: Mapping[int, tuple[TokenLogprobs, ...]], turn: int
    ) -> None:
        """Send the log-probabilities of a token of each of these slots, of those that asked."""
        table = self._table
        for slot, handle in zip(slots.tolist(), table.handle[slots].tolist(), strict=True):
            entries = logprobs.get(slot)
            if entries is None:
                continue
            if table.has_watched:
                self._give_logprobs(table.at(slot), entries[turn])
            else:
                self._outputs.logprobs(handle, entries[turn])

    def _give_logprobs(self, sequence: Sequence, entry: TokenLogprobs) -> None:
        if sequence.group.is_watched:
            self._unsent.append_logprobs(sequence, entry)
        else:
            self._outputs.logprobs(sequence.handle, entry)

    def _end_if_due(self, sequence: Sequence, token_ids: IntArray) -> None:
        """End a sequence if the last of its tokens does so. A watched sequence keeps its slot and
        blocks until the verdict, which may continue it."""
        group = sequence.group
        output = token_ids[len(group.request.prompt_token_ids) :]
        has_room = len(token_ids) < group.max_total_tokens
        reason = group.request.ending(output, has_room=has_room)
        if reason is None:
            return
        stop = int(output[-1]) if reason is FinishReason.STOP else None
        finish = SequenceFinish(sequence.handle, reason, stop)
        if not sequence.group.is_watched:
            self._lifecycle.finish(sequence, finish)
            return
        last, slot = self._drop(sequence), sequence.slot
        if slot >= 0:
            self._stop(slot, int(self._table.num_known[slot]), last)
            self._ended.add(slot)
        sequence.num_pending = 0
        self._unsent.end(sequence, finish)
        if sequence.group.state is GroupState.WAITING:
            self._lifecycle.await_verdict(sequence.group)

    def _stop(self, slot: int, num_kept: int, last_step: int) -> bool:
        """Stop a slot until its row has been rewound to `num_kept` tokens, after the result of
        `last_step`. Return False if the row cannot be rewound; then it is stopped for good."""
        table = self._table
        may_stay = self._rewinds.may_stay(slot, num_kept)
        if may_stay:
            num_computed = int(table.num_computed[slot] - table.num_drafted[slot])
            self._rewinds.begin(slot, num_kept, num_computed, last_step)
        table.stop(slot, num_kept)
        return may_stay

    # --- verdicts -------------------------------------------------------------------------------

    def judge(self, verdict: Verdict) -> None:
        """Take in what becomes of tokens that were not sent."""
        sequence = self._unsent.find(verdict.handle)
        if sequence is None or sequence.unsent is None:
            return
        unsent = sequence.unsent
        if verdict.failure is not None:
            self._lifecycle.fail(sequence.group, verdict.failure)
            return
        self._unsent.answered(unsent, verdict.num_passed)
        if verdict.end is not None:
            reason = FinishReason.CONTENT_FILTER
            self._lifecycle.finish(
                sequence, SequenceFinish(sequence.handle, reason, message=verdict.end)
            )
        elif verdict.num_kept is not None:
            self._replace(sequence, verdict.num_kept - verdict.num_passed, verdict.instead)
        elif unsent.finish is not None and unsent.is_end_told:
            self._lifecycle.finish(sequence, unsent.finish)
        else:
            self._unsent.went_on(sequence)
        self._rewinds.settle(self._last_applied)

    def _replace(self, sequence: Sequence, num_kept: int, instead: IntArray) -> None:
        """Put tokens in place of the unsent ones after the first `num_kept`."""
        group, unsent = sequence.group, sequence.unsent
        assert unsent is not None
        if group.request.params.logprobs is not None:
            self._lifecycle.fail(
                group,
                "tokens of this output were replaced, so nobody knows their log-probabilities: "
                "ask without logprobs",
            )
            return
        num_gone = self._unsent.cut(unsent, num_kept)
        self._go_back(sequence, num_gone)
        for token in instead.tolist():
            if unsent.finish is not None:
                break
            if sequence.slot >= 0:
                self._append(np.array([sequence.slot]), np.array([token], np.int32))
            else:
                self._append_to(sequence, token)
        if sequence.slot >= 0:
            self._table.stop(sequence.slot, int(self._table.num_known[sequence.slot]))
        self._unsent.written(sequence)
        self._lifecycle.settle_verdicts(group)

    def _go_back(self, sequence: Sequence, num_gone: int) -> None:
        """Drop the last known tokens of a sequence and everything computed from them: in place, or
        else by computing its group again."""
        last, slot, group = self._drop(sequence), sequence.slot, sequence.group
        if slot >= 0:
            num_kept = int(self._table.num_known[slot]) - num_gone
            is_here = not group.is_coming_in
            if is_here and self._stop(slot, num_kept, last):
                return
            if not is_here:
                self._table.stop(slot, num_kept)
            self._lifecycle.preempt(group, PreemptionCause.RESULT, may_swap=False)
        else:
            num_kept = len(sequence.token_ids) - num_gone
            sequence.token_ids = sequence.token_ids[:num_kept]
        self._recovery.forget(group)
        del sequence.names[num_kept // self._kv.block_size :]
        sequence.num_pending = 0

    def _handle_of(self, step: InFlight, slot: int) -> int | None:
        """Return the sequence that had this slot in that step, if it is live or was preempted
        meanwhile."""
        if step.generation[slot] == self._table.generation[slot]:
            return int(self._table.handle[slot])
        sequence = step.sequences[slot]
        if sequence is None or not sequence.num_pending or slot in step.dropped:
            return None
        return sequence.handle

    def _append_departed(
        self,
        step: InFlight,
        given: RowTokens,
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
    ) -> None:
        """Tokens of sequences that were preempted while their step was in flight still count."""
        slots: list[int] = given.slots.tolist()
        for i, slot in enumerate(slots):
            sequence = step.sequences[slot]
            if sequence is None or not sequence.num_pending or slot in step.dropped:
                continue
            sequence.num_pending -= 1 + step.num_drafts(slot)
            entries = logprobs.get(slot, ())
            for turn, token in enumerate(given.of_row(i)):
                if sequence not in sequence.group.sequences or sequence.has_ended:
                    break  # the token before has ended it
                if entries:
                    self._give_logprobs(sequence, entries[turn])
                self._append_to(sequence, token)

    def _append_to(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
        if sequence.group.is_watched:
            self._unsent.append(sequence, token)
        else:
            self._outputs.tokens(np.array([sequence.handle]), np.array([token], np.int32))
        self._end_if_due(sequence, sequence.token_ids)

    def _fail_rows(self, step: InFlight, result: StepResult) -> None:
        """Fail the requests of failed rows. Blocks published since the step was planned may be
        garbage, so their names are withdrawn, and sequences that may have read them are computed
        again."""
        self._kv.retract(step.mark)
        for failure in sorted(result.failed, key=lambda f: int(step.starts[f.slot])):
            sequence = step.sequences[failure.slot]
            if sequence is None:
                continue  # it failed because it read the blocks of a row that failed before it
            start = 0 if failure.slot in step.swapped_in else int(step.starts[failure.slot])
            bad_block = start // self._kv.block_size
            if len(sequence.names) > bad_block:
                self._distrust(step, sequence, bad_block)
            if failure.slot in step.dropped:
                self._compute_again([sequence.group])  # it failed for a token that was refused
            elif sequence in sequence.group.sequences:
                self._lifecycle.fail(
                    sequence.group, failure.message, is_request_fault=failure.is_request_fault
                )

    def _distrust(self, step: InFlight, failed: Sequence, bad_block: int) -> None:
        """Compute again every sequence that has the block at index `bad_block` of a failed
        sequence, by name: a sliding group may have read and released it."""
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
        self._compute_again(readers.values(), step)

    def _compute_again(self, groups: Iterable[SequenceGroup], *more: InFlight) -> None:
        """Compute groups again from their tokens. Tokens that steps in flight, and `more`, give
        them are dropped."""
        for group in groups:
            if group.has_slots:
                self._lifecycle.preempt(group, PreemptionCause.RESULT, may_swap=False)
            self._recovery.forget(group)
            for sequence in group.sequences:
                sequence.num_pending = 0
            for each in (*more, *self._in_flight):
                each.sequences[:] = [
                    None if s is not None and s.group is group else s for s in each.sequences
                ]

    def lose_all(self) -> None:
        """Forget the steps in flight: nothing waits for their tokens any more."""
        for step in self._in_flight:
            for sequence in step.sequences:
                if sequence is not None:
                    sequence.num_pending = 0  # drawn again, and the same: noise has no state
        self._rewinds.forget()
        self._in_flight.clear()
