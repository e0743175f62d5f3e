"""Decides, with integers only, which sequences compute how many tokens in the next step."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError, RequestError
from quire.kv_cache import BlockHasher, KVManager
from quire.protocol.request import EngineOutput, EngineRequest, FinishReason, SequenceFinish
from quire.protocol.step import StepPlan, StepResult
from quire.scheduler.admission import Admission
from quire.scheduler.outputs import OutputCollector
from quire.scheduler.plan_builder import InFlight, PlanBuilder
from quire.scheduler.policy import Policy
from quire.scheduler.prefix import PrefixCache
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable

__all__ = ["Scheduler", "SchedulerStats"]

Slots = npt.NDArray[np.int64]

NUM_BLOCKS_PER_HEADROOM = 100
"""New groups leave one block in a hundred to those that already run, so that an admission does
not cause a preemption in the next step (the value is that of vLLM's watermark)."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler; counts since start where the name says `total`."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_tokens_in_used_blocks: int
    preempted_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    steps_total: int


class Scheduler:
    """A pure machine: `plan(now)` and `apply(result)`, no I/O, no clock, no randomness.

    Every sequence has two scalars, its total and its computed tokens; a step closes part of the
    gap. Decoding sequences come first, then prompts take what the token budget leaves, running
    before waiting, each in the order of the policy's key. When blocks run out, the group with the
    largest key is preempted whole and computed again later; the one with the smallest never is.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        hasher: BlockHasher,
        policy: Policy,
        admission: Admission,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._kv = kv
        self._policy = policy
        self._admission = admission
        self._token_budget = max_num_batched_tokens
        self._table = SequenceTable(max_num_seqs, max_model_len)
        self._prefixes = PrefixCache(self._table, kv, hasher, enable_prefix_caching)
        self._builder = PlanBuilder(self._table, kv)
        self._outputs = OutputCollector()
        self._in_flight: deque[InFlight] = deque()
        self._waiting: list[SequenceGroup] = []  # sorted by key
        self._running: list[SequenceGroup] = []  # sorted by key
        self._groups: dict[int, SequenceGroup] = {}  # by handle of each live sequence
        self._branching: list[SequenceGroup] = []  # admitted, with samples still to branch off
        self._num_groups_added = 0
        self._preempted_total = 0
        self._prompt_tokens_total = 0
        self._cached_tokens_total = 0
        self._steps_total = 0

    # --- requests come and go -------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if it could never be served by this engine."""
        max_total = self._admission.max_total_tokens(request)
        self._check_resumable(request, max_total)
        tokens = np.concatenate((request.prompt_token_ids, request.output_token_ids))
        tokens = tokens.astype(np.int32, copy=False)
        root, names = self._prefixes.name_prompt(request.salt, tokens)
        for samples in self._admission.split(request, max_total):
            group = SequenceGroup(request, self._num_groups_added, root, max_total)
            self._num_groups_added += 1
            first, *unborn = samples
            group.sequences.append(Sequence(group, first, tokens, list(names)))
            group.unborn = tuple(unborn)
            group.key = self._policy.key(group)
            self._register(group)
            bisect.insort(self._waiting, group, key=lambda g: g.key)

    def _check_resumable(self, request: EngineRequest, max_total: int) -> None:
        output = request.output_token_ids
        if len(output) and request.params.n > 1:
            raise RequestError(
                f"a request that resumes has one sequence, not n = {request.params.n}"
            )
        if len(request.prompt_token_ids) + len(output) >= max_total:
            raise RequestError(
                f"the request comes with {len(output)} output tokens and may have "
                f"{max_total - len(request.prompt_token_ids)}: nothing is left to generate"
            )
        if len(output) and self._is_stop(request, int(output[-1]), len(output)):
            raise RequestError(
                f"the request comes with output that ends in its stop token {int(output[-1])}: "
                "nothing is left to generate"
            )

    def _is_stop(self, request: EngineRequest, token: int, num_output: int) -> bool:
        """Whether `token`, the last of `num_output`, ends a sequence of this request."""
        return token in request.stop_token_ids and num_output >= request.params.min_tokens

    def _register(self, group: SequenceGroup) -> None:
        base = group.request.first_handle
        for sample in (*(s.sample_index for s in group.sequences), *group.unborn):
            if base + sample in self._groups:
                raise EngineError(f"handle {base + sample} is in use already; choose another")
            self._groups[base + sample] = group

    def abort(self, handle: int) -> None:
        """End one sequence, whatever its state; its finish leaves with the next output."""
        group = self._groups.get(handle)
        if group is None:
            return
        sample = handle - group.request.first_handle
        finish = SequenceFinish(handle, FinishReason.ABORT)
        if sample in group.unborn:
            group.unborn = tuple(i for i in group.unborn if i != sample)
            self._close(group, finish)
            return
        sequence = next(s for s in group.sequences if s.sample_index == sample)
        if group.unborn and len(group.sequences) == 1 and sequence.sample_index == sample:
            self._pass_on(group, sequence)
            self._close(group, finish)
            return
        self._finish(sequence, finish)

    def _pass_on(self, group: SequenceGroup, sequence: Sequence) -> None:
        """The only sequence so far is aborted while samples wait to branch off from it: the first
        of them takes its place. A row's random stream is fixed when it enters, so a running one
        starts again; the prefix cache gives its blocks back."""
        if sequence.slot >= 0:
            self._preempt(group)
        sequence.sample_index, *rest = group.unborn
        group.unborn = tuple(rest)

    def _finish(self, sequence: Sequence, finish: SequenceFinish) -> None:
        group = sequence.group
        if sequence.slot >= 0:
            self._vacate(sequence)
        sequence.num_pending = 0
        group.sequences.remove(sequence)
        self._close(group, finish)

    def _close(self, group: SequenceGroup, finish: SequenceFinish) -> None:
        """Report the end of one sequence, and drop its group when it was the last."""
        del self._groups[finish.handle]
        self._outputs.finish(finish)
        if not group.sequences:
            self._remove(group)
            group.state = GroupState.FINISHED

    def _fail(self, group: SequenceGroup, message: str) -> None:
        base = group.request.first_handle
        for sample in group.unborn:
            self._close_unborn(group, sample, message)
        group.unborn = ()
        for sequence in list(group.sequences):
            handle = base + sequence.sample_index
            self._finish(sequence, SequenceFinish(handle, FinishReason.ERROR, message=message))

    def _close_unborn(self, group: SequenceGroup, sample: int, message: str) -> None:
        handle = group.request.first_handle + sample
        del self._groups[handle]
        self._outputs.finish(SequenceFinish(handle, FinishReason.ERROR, message=message))

    def _remove(self, group: SequenceGroup) -> None:
        if group.state is GroupState.WAITING:
            self._waiting.remove(group)
            return
        self._running.remove(group)
        if group in self._branching:
            self._branching.remove(group)

    def _vacate(self, sequence: Sequence) -> None:
        self._kv.free(sequence.slot)
        self._builder.leave(self._table.leave(sequence))

    # --- planning -------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now`: seconds."""
        del now  # first come, first served needs no clock; deadlines and ageing will
        table, mark = self._table, self._kv.mark()
        slots, tokens = self._choose_running()
        slots, tokens, was_preempted = self._give_blocks(slots, tokens)
        if not was_preempted:
            slots, tokens = self._admit_waiting(slots, tokens)
        if not len(slots):
            return None
        starts = table.num_computed.copy()
        self._advance(slots, tokens)
        plan = self._builder.build(slots, tokens)
        step = InFlight(plan.step_id, table.generation.copy(), starts, table.sequences.copy(), mark)
        self._in_flight.append(step)
        self._steps_total += 1
        return plan

    def _choose_running(self) -> tuple[Slots, Slots]:
        """Tokens for each running sequence that has any left: decodes, then prompts by key."""
        table = self._table
        todo = np.where(
            table.live & (table.num_total < table.max_total),
            table.num_total - table.num_computed,
            0,
        )
        slots = np.flatnonzero(todo)
        tokens = todo[slots]
        if int(tokens.sum()) <= self._token_budget:
            return slots, tokens
        order = sorted(
            range(len(slots)),
            key=lambda i: (tokens[i] > 1, table.at(int(slots[i])).group.key),
        )
        budget = self._token_budget
        for i in order:
            tokens[i] = min(int(tokens[i]), budget)
            budget -= int(tokens[i])
        return slots[tokens > 0], tokens[tokens > 0]

    def _give_blocks(self, slots: Slots, tokens: Slots) -> tuple[Slots, Slots, bool]:
        """Allocate for the chosen tokens; preempt from the back of the order while short."""
        starts = self._table.num_computed[slots]
        if self._kv.grow(slots, starts, starts + tokens):
            return slots, tokens, False
        chosen = dict(zip(slots.tolist(), tokens.tolist(), strict=True))
        for group in list(self._running):
            if group.state is not GroupState.RUNNING:
                break  # preempted for one before it, and so is everything after it
            while group.state is GroupState.RUNNING and not self._grow_group(group, chosen):
                self._preempt(self._running[-1])
        kept = [slot for slot in chosen if self._table.live[slot]]
        counts = [chosen[slot] for slot in kept]
        return np.array(kept, np.int64), np.array(counts, np.int64), True

    def _grow_group(self, group: SequenceGroup, chosen: dict[int, int]) -> bool:
        slots = np.array([s.slot for s in group.sequences if s.slot in chosen], np.int64)
        starts = self._table.num_computed[slots]
        tokens = np.array([chosen[int(slot)] for slot in slots], np.int64)
        return self._kv.grow(slots, starts, starts + tokens)

    def _preempt(self, group: SequenceGroup) -> None:
        """Take all of a group's blocks; it keeps its key and will be computed again."""
        self._remove(group)
        for sequence in group.sequences:
            slot = sequence.slot
            sequence.num_pending = int(self._table.num_total[slot] - self._table.num_known[slot])
            self._vacate(sequence)
        group.state = GroupState.WAITING
        bisect.insort(self._waiting, group, key=lambda g: g.key)
        self._preempted_total += 1

    def _admit_waiting(self, slots: Slots, tokens: Slots) -> tuple[Slots, Slots]:
        """Admit waiting groups in order until one does not fit; it holds back all after it."""
        budget = self._token_budget - int(tokens.sum())
        admitted: list[tuple[int, int]] = []
        while self._waiting and budget > 0:
            group = self._waiting[0]
            chunks = self._try_admit(group, budget)
            if not chunks:
                break
            del self._waiting[0]
            bisect.insort(self._running, group, key=lambda g: g.key)
            group.state = GroupState.RUNNING
            if group.unborn:
                self._branching.append(group)
            budget -= sum(count for _, count in chunks)
            admitted += [chunk for chunk in chunks if chunk[1]]
        if not admitted:
            return slots, tokens
        new = np.array(admitted, np.int64)
        return np.concatenate((slots, new[:, 0])), np.concatenate((tokens, new[:, 1]))

    def _try_admit(self, group: SequenceGroup, budget: int) -> list[tuple[int, int]]:
        """(slot, tokens) of each sequence of the group, or nothing at all if it does not fit."""
        if group.num_slots > self._num_free_slots():
            return []
        if any(sequence.num_pending for sequence in group.sequences):
            return []
        chunks: list[tuple[int, int]] = []
        mark = self._kv.mark()
        cached = 0
        for sequence in group.sequences:
            chunk = self._enter(sequence, budget)
            if chunk is None:
                self._undo_enter(group, mark)
                return []
            slot, count = chunk
            budget -= count
            cached += int(self._table.num_computed[slot])
            chunks.append(chunk)
        self._note_admission(group, cached)
        return chunks

    def _num_free_slots(self) -> int:
        reserved = sum(len(group.unborn) for group in self._branching)
        return self._table.num_free - reserved

    def _enter(self, sequence: Sequence, budget: int) -> tuple[int, int] | None:
        """Give the sequence a slot that starts with its cached prefix, and blocks for as many
        tokens as the budget allows. Its slot and these tokens, or None if there is no room."""
        hit = self._prefixes.lookup(sequence)
        num_cached = hit.num_blocks * self._kv.block_size
        end = min(len(sequence.token_ids), num_cached + budget)
        headroom = self._kv.pool.num_blocks // NUM_BLOCKS_PER_HEADROOM if self._running else 0
        if self._kv.num_blocks_to_enter(hit, end) + headroom > self._kv.pool.num_available:
            return None
        slot = self._table.enter(sequence, num_cached)
        slots = np.array([slot], np.int64)
        self._kv.enter(slot, hit)
        self._kv.grow(slots, slots * 0 + num_cached, slots * 0 + end)
        self._prefixes.publish_to(slot, end)
        return slot, end - num_cached

    def _undo_enter(self, group: SequenceGroup, mark: int) -> None:
        self._kv.retract(mark)
        entered = [sequence for sequence in group.sequences if sequence.slot >= 0]
        self._kv.forget_updates({sequence.slot for sequence in entered})
        for sequence in entered:
            self._kv.free(sequence.slot)
            self._table.leave(sequence)

    def _note_admission(self, group: SequenceGroup, cached: int) -> None:
        for sequence in group.sequences:
            self._builder.enter(sequence, int(self._table.num_computed[sequence.slot]))
        if not group.was_admitted:
            group.was_admitted = True
            self._prompt_tokens_total += len(group.request.prompt_token_ids)
            self._cached_tokens_total += cached
            self._outputs.cached(group.sequences[0].handle, cached)

    def _advance(self, slots: Slots, tokens: Slots) -> None:
        """Count the step as done: upper bounds from now on. Samples branch off here."""
        table = self._table
        table.num_computed[slots] += tokens
        self._prefixes.publish(slots)
        reached = slots[table.num_computed[slots] == table.num_total[slots]]
        table.num_total[reached] += 1
        for group in self._branching:
            self._fork_unborn(group)
        self._branching = [group for group in self._branching if group.unborn]

    def _fork_unborn(self, group: SequenceGroup) -> None:
        table = self._table
        source = group.sequences[0]
        src = source.slot
        if table.num_total[src] == table.num_known[src]:
            return  # its prompt is not computed yet
        for sample in group.unborn:
            tokens = table.known_tokens(src).copy()
            sequence = Sequence(group, sample, tokens, list(source.names))
            dst = table.enter(sequence, int(table.num_computed[src]))
            table.num_total[dst] += 1
            group.sequences.append(sequence)
            self._kv.fork(src, dst)
            self._builder.fork(src, dst, sample)
        group.unborn = ()

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> EngineOutput:
        """Take in the oldest planned step's result; what it and aborts since gave to clients."""
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise EngineError(f"result of step {result.step_id} arrived, {step.step_id} was due")
        if result.failed:
            self._fail_rows(step, result)
        self._kv.settle(self._in_flight[0].mark if self._in_flight else self._kv.mark())
        if result.logprobs or result.prompt_logprobs:
            self._take_logprobs(step, result)
        slots = result.slots.astype(np.int64)
        alive = step.generation[slots] == self._table.generation[slots]
        if not alive.all():
            self._append_departed(step, result, ~alive)
            slots = slots[alive]
        self._append(slots, result.token_ids[alive])
        return self._outputs.drain()

    def _append(self, slots: Slots, tokens: npt.NDArray[np.int32]) -> None:
        table = self._table
        table.token_ids[slots, table.num_known[slots]] = tokens
        table.num_known[slots] += 1
        self._outputs.tokens(table.handle[slots], tokens)
        self._prefixes.publish(slots)
        stopped = table.stops(slots, tokens)
        ended = stopped | (table.num_known[slots] >= table.max_total[slots])
        for i in np.flatnonzero(ended):
            sequence = table.at(int(slots[i]))
            stop = int(tokens[i]) if stopped[i] else None
            self._finish(sequence, self._ended(sequence, stop))

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
        if self._is_stop(request, token, num_output):
            self._finish(sequence, self._ended(sequence, token))
        elif len(sequence.token_ids) >= sequence.group.max_total_tokens:
            self._finish(sequence, self._ended(sequence, None))

    def _fail_rows(self, step: InFlight, result: StepResult) -> None:
        """Fail the requests of failed rows. What was published since the step was planned may be
        garbage and is taken back; sequences that may have read it are computed again."""
        self._kv.retract(step.mark)
        for failure in sorted(result.failed, key=lambda f: int(step.starts[f.slot])):
            sequence = step.sequences[failure.slot]
            if sequence is None:
                continue  # it failed because it read the blocks of a row that failed before it
            bad_block = int(step.starts[failure.slot]) // self._kv.block_size
            if len(sequence.names) > bad_block:
                self._distrust(step, sequence, bad_block)
            if sequence in sequence.group.sequences:
                self._fail(sequence.group, failure.message)

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
            if group.state is GroupState.RUNNING:
                self._preempt(group)
            for sequence in group.sequences:
                sequence.num_pending = 0
            for each in steps:
                each.sequences[:] = [
                    None if s is not None and s.group is group else s for s in each.sequences
                ]

    def fail_running(self, message: str) -> EngineOutput:
        """Take in that the steps in flight are lost: requests that were in them fail, those that
        wait do not, and nothing that was cached is trusted any more."""
        for step in self._in_flight:
            for sequence in step.sequences:
                if sequence is not None:
                    sequence.num_pending = 0  # drawn again, and the same: noise has no state
        self._in_flight.clear()
        for group in list(self._running):
            self._fail(group, message)
        self._kv.pool.drop_cached()
        self._kv.settle(self._kv.mark())
        return self._outputs.drain()

    # --- readings -------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended, or its end has not been reported yet."""
        return bool(self._groups) or self._outputs.has_any

    def flush(self) -> EngineOutput:
        """What aborts gave to clients, when there is no result to carry it."""
        return self._outputs.drain()

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_tokens_in_used_blocks=int(self._table.num_computed[self._table.live].sum()),
            preempted_total=self._preempted_total,
            prompt_tokens_total=self._prompt_tokens_total,
            cached_tokens_total=self._cached_tokens_total,
            steps_total=self._steps_total,
        )

    def check_invariants(self) -> None:
        """Raise EngineError if bookkeeping and queues disagree; for tests and debugging."""
        self._kv.check_invariants()
        held = {s.slot for group in self._running for s in group.sequences}
        if held != set(np.flatnonzero(self._table.live).tolist()):
            raise EngineError(f"slots {sorted(held)} are held but other slots are live")
        for queue in (self._running, self._waiting):
            keys = [group.key for group in queue]
            if keys != sorted(keys):
                raise EngineError("a queue is out of order")
        if any(s.slot >= 0 for group in self._waiting for s in group.sequences):
            raise EngineError("a waiting sequence holds a slot")
        if not self._groups and (self._kv.pool.num_used or self._running or self._waiting):
            raise EngineError("blocks or groups are left although every request has ended")
