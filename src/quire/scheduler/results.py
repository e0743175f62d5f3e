"""Takes in what steps computed: tokens, log-probabilities, failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.step import FloatArray, IntArray, RowTokens, StepResult, TokenLogprobs
from quire.scheduler.beams.intake import BeamIntake
from quire.scheduler.constraints.tails import TailRewinds, TokenCheck, Verdict
from quire.scheduler.drafts import ChosenDrafts
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.sequence import Sequence, SequenceGroup
from quire.scheduler.state import SchedulerState

__all__ = ["ResultIntake"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was planned and whose result has not been applied.

    generation, starts, sequences: by slot, as of the plan; `starts` are the computed counts before
        the step, corrected by what earlier steps did not accept. A sequence whose results are not
        wanted any more is struck off `sequences`.
    dropped: slots that compute with a token that was refused; what they are given is refused too.
    drafts: by slot, how many of them the step verifies; None if none does.
    mark: what this step's rows publish has this mark or a later one (`KVManager.mark`).
    swapped_in: slots whose blocks came from the host with this step.
    """

    step_id: int
    generation: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sequences: list[Sequence | None]
    mark: int
    swapped_in: frozenset[int] = frozenset()
    drafts: Slots | None = None
    dropped: set[int] = field(default_factory=set[int])

    def num_drafts(self, slot: int) -> int:
        """Drafts that this slot verifies."""
        return 0 if self.drafts is None else int(self.drafts[slot])


class ResultIntake:
    """Knows the steps in flight, oldest first, and applies their results in this order."""

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        beams: BeamIntake,
        check: TokenCheck | None,
        on_verified: Callable[[Slots, Slots, Slots], None],
    ) -> None:
        """on_verified: told of slots [R], how many drafts each had, and how many were right."""
        self._table = state.table
        self._kv = state.kv
        self._prefixes = state.prefixes
        self._recovery = state.recovery
        self._outputs = state.outputs
        self._lifecycle = lifecycle
        self._beams = beams
        self._check = check
        self._on_verified = on_verified
        self._rewinds = TailRewinds(state)
        self._in_flight: deque[InFlight] = deque()

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
        if result.failed:
            self._fail_rows(step, result)
        self._kv.settle(self._in_flight[0].mark if self._in_flight else self._kv.mark())
        for slot, piece in result.prompt_logprobs.items():
            if (handle := self._handle_of(step, slot)) is not None:
                self._outputs.prompt_logprobs(handle, piece)
        slots = result.slots.astype(np.int64)
        alive = step.generation[slots] == self._table.generation[slots]
        is_plain = result.counts is None and step.drafts is None and not result.logprobs
        if is_plain and self._check is None and alive.all():
            self._append(slots, result.token_ids)
        else:
            self._take_tokens(step, result, alive)
        for slot, candidates in result.candidates.items():
            if step.generation[slot] == self._table.generation[slot]:
                self._beams.take(self._table.at(slot), candidates)
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
            self._rewinds.count(given.slots.tolist(), given.counts.tolist())
        if not alive.all():
            self._append_departed(step, given.select(~alive), result.logprobs)
            given = given.select(alive)
        if step.drafts is not None:
            self._rewind(given.slots, step.drafts[given.slots], given.counts)
        if self._check is None or not self._table.is_checked[given.slots].any():
            self._append_in_turn(given, result.logprobs)
        else:
            self._append_checked(self._check, given, result.logprobs)

    def _rewind(self, slots: Slots, drafted: Slots, counts: Slots) -> None:
        """Take back what the plan side counted of drafts that were not accepted."""
        rows = drafted > 0
        slots, drafted, rejected = slots[rows], drafted[rows], (drafted + 1 - counts)[rows]
        self._on_verified(slots, drafted, drafted - rejected)
        self._table.rewind(slots, drafted, rejected)
        self._kv.give_back(slots, self._table.num_computed[slots])
        for step in self._in_flight:
            step.starts[slots] -= rejected  # of the same sequences: they are alive

    def _append_checked(
        self,
        check: TokenCheck,
        given: RowTokens,
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
    ) -> None:
        """Append what the check lets pass, and what it puts in place of other tokens."""
        table, rows = self._table, dict[int, list[int]]()
        refused = dict[int, tuple[int, int]]()  # by slot: tokens in place of others, and those
        for i, slot in enumerate(given.slots.tolist()):
            if not table.live[slot]:
                continue  # a sibling has failed
            rows[slot] = drawn = given.of_row(i)
            if not table.is_checked[slot]:
                continue
            sequence = table.at(slot)
            verdict = self._judge(check, sequence, table.known_tokens(slot), drawn)
            if verdict is None:
                continue
            if isinstance(verdict, str):
                del rows[slot]
                self._lifecycle.fail(sequence.group, verdict)
                continue
            num_instead = len(verdict.instead)
            rows[slot] = [*drawn[: verdict.num_accepted], *verdict.instead.tolist()]
            refused[slot] = num_instead, len(drawn) - verdict.num_accepted
            table.stop(slot, verdict.num_accepted, num_instead)
        generation = {slot: int(table.generation[slot]) for slot in refused}
        self._append_in_turn(
            _row_tokens(
                {  # of those with tokens and without a sibling that has failed
                    slot: tokens for slot, tokens in rows.items() if tokens and table.live[slot]
                }
            ),
            logprobs,
        )
        for slot, (num_instead, num_refused) in refused.items():
            if table.generation[slot] == generation[slot] and table.live[slot]:
                self._replace_tail(slot, num_instead, num_refused)

    def _judge(
        self, check: TokenCheck, sequence: Sequence, known: IntArray, drawn: list[int]
    ) -> Verdict | str | None:
        """None if all tokens stay; a sentence if the request fails for it."""
        try:
            verdict = check.judge(sequence, known.copy(), np.array(drawn, np.int32))
            if verdict is None or (verdict.num_accepted == len(drawn) and not len(verdict.instead)):
                return None
            if not 0 <= verdict.num_accepted <= len(drawn) or (verdict.instead < 0).any():
                raise ValueError(f"{verdict} is no verdict on {len(drawn)} tokens")
        except Exception as error:  # noqa: BLE001  whatever it is, it must end with its request
            return f"the check of this request's tokens failed ({error!r}): send it again"
        if len(verdict.instead) and sequence.group.request.params.logprobs is not None:
            return (
                "tokens of this output were replaced, so nobody knows their log-probabilities: "
                "ask without logprobs"
            )
        return verdict

    def _replace_tail(self, slot: int, num_instead: int, num_refused: int) -> None:
        """Have a stopped row forget the tokens that were refused, and all that came of them."""
        sequence = self._table.at(slot)
        last = self._drop(sequence)
        if self._rewinds.may_stay(slot, num_instead):
            self._rewinds.begin(slot, num_instead, num_refused, last)
        else:
            self._lifecycle.preempt(sequence.group, may_swap=False)

    def _drop(self, sequence: Sequence) -> int:
        """What steps in flight compute of a sequence is not wanted. The last of these steps."""
        for step in self._in_flight:
            for slot, each in enumerate(step.sequences):
                if each is sequence:
                    step.generation[slot] = -1
                    step.dropped.add(slot)
        return self._in_flight[-1].step_id if self._in_flight else -1

    def _append_in_turn(
        self, given: RowTokens, logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    ) -> None:
        """Append the first token of each row, then the second of those that go on, and so forth, so
        that every rule sees one token at a time. What follows the end of a sequence is dropped."""
        table, slots, starts = self._table, given.slots, given.starts
        num_turns = int(given.counts.max(initial=0))
        generation = table.generation[slots]
        for turn in range(num_turns):
            if turn:
                rows = (given.counts > turn) & (table.generation[given.slots] == generation)
                slots, starts = given.slots[rows], given.starts[rows]
            for slot in slots.tolist() if logprobs else ():
                if slot in logprobs:
                    self._outputs.logprobs(int(table.handle[slot]), logprobs[slot][turn])
            self._append(slots, given.token_ids[starts + turn])

    def _append(self, slots: Slots, tokens: npt.NDArray[np.int32]) -> None:
        """Append a token to each of these distinct slots [R]."""
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

    def _handle_of(self, step: InFlight, slot: int) -> int | None:
        """Whose row this slot was in that step, if it is live or was preempted meanwhile."""
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
            for turn, token in enumerate(self._passed(sequence, given.of_row(i))):
                if sequence not in sequence.group.sequences:
                    break  # the token before has ended it
                if entries:
                    self._outputs.logprobs(sequence.handle, entries[turn])
                self._append_to(sequence, token)

    def _passed(self, sequence: Sequence, drawn: list[int]) -> list[int]:
        """What the check makes of the tokens of a sequence that was preempted."""
        if self._check is None or not sequence.group.is_checked:
            return drawn
        verdict = self._judge(self._check, sequence, sequence.token_ids, drawn)
        if verdict is None:
            return drawn
        if isinstance(verdict, str):
            self._lifecycle.fail(sequence.group, verdict)
            return []
        self._drop(sequence)
        sequence.num_pending = 0
        return [*drawn[: verdict.num_accepted], *verdict.instead.tolist()]

    def _append_to(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
        self._outputs.tokens(np.array([sequence.handle]), np.array([token], np.int32))
        request = sequence.group.request
        num_output = len(sequence.token_ids) - len(request.prompt_token_ids)
        if request.is_stop(token, num_output):
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
            if failure.slot in step.dropped:
                self._compute_again([sequence.group])  # it failed for a token that was refused
            elif sequence in sequence.group.sequences:
                self._lifecycle.fail(
                    sequence.group, failure.message, is_request_fault=failure.is_request_fault
                )

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
        self._compute_again(readers.values(), step)

    def _compute_again(self, groups: Iterable[SequenceGroup], *more: InFlight) -> None:
        """Compute groups from their tokens. Nobody waits for what steps in flight, and `more`, give
        them."""
        for group in groups:
            if group.has_slots:
                self._lifecycle.preempt(group, may_swap=False)
            self._recovery.forget(group)
            for sequence in group.sequences:
                sequence.num_pending = 0
            for each in (*more, *self._in_flight):
                each.sequences[:] = [
                    None if s is not None and s.group is group else s for s in each.sequences
                ]

    def lose_all(self) -> None:
        """The steps in flight never happened: nobody waits for their tokens."""
        for step in self._in_flight:
            for sequence in step.sequences:
                if sequence is not None:
                    sequence.num_pending = 0  # drawn again, and the same: noise has no state
        self._rewinds.forget()
        self._in_flight.clear()


def _row_tokens(rows: Mapping[int, list[int]]) -> RowTokens:
    counts = np.array([len(tokens) for tokens in rows.values()], np.int64)
    token_ids = [token for tokens in rows.values() for token in tokens]
    return RowTokens(np.fromiter(rows, np.int64, len(rows)), counts, np.array(token_ids, np.int32))
