"""Decides, with integers only, which sequences compute how many tokens in the next step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError, RequestError
from quire.kv_cache import BlockHasher, KVManager
from quire.protocol.pins import PinnedPrefix
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.request import EngineOutput, EngineRequest, FinishReason
from quire.protocol.step import IntArray, StepPlan, StepResult
from quire.scheduler.admission import Admission
from quire.scheduler.beams import BeamIntake, new_beam_group
from quire.scheduler.branching import branch_off
from quire.scheduler.deadlines import Deadlines, PrefillSpeed
from quire.scheduler.outputs import OutputCollector
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.plan_builder import InFlight, PlanBuilder
from quire.scheduler.policy import CountsTokens, Policy
from quire.scheduler.prefix import PrefixCache
from quire.scheduler.recovery import Recovery
from quire.scheduler.results import ResultIntake
from quire.scheduler.roster import Roster
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable
from quire.scheduler.token_budget import PrefillLimits, TokenBudget

__all__ = ["Scheduler", "SchedulerStats"]

Slots = npt.NDArray[np.int64]

NUM_BLOCKS_PER_HEADROOM = 100
"""New groups leave one block in a hundred to those that already run, so that an admission does
not cause a preemption in the next step (the value is that of vLLM's watermark)."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler; counts since start where the name says `total`.

    num_table_entries: blocks that the block tables name; 1 - num_used_blocks / num_table_entries is
        what sharing saves (PagedAttention, section 6.3).
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_table_entries: int
    num_tokens_in_used_blocks: int
    preempted_total: int
    num_host_blocks: int
    num_used_host_blocks: int
    swapped_out_total: int
    swapped_in_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    steps_total: int


class Scheduler:
    """A pure machine: `plan(now)` and `apply(result)`, no I/O, no clock, no randomness.

    Every sequence has two scalars, its total and its computed tokens; a step closes part of the
    gap. Decoding sequences come first, then prompts take what the token budget leaves, running and
    waiting ones in the order of the policy's key. When blocks run out, the group with the
    largest key is preempted whole, and swapped in or computed again later; the one with the
    smallest never is.
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
        prefill_limits: PrefillLimits | None = None,
        recovery_costs: RecoveryCosts | None = None,
    ) -> None:
        """recovery_costs: by which preempted groups are swapped to the host blocks of `kv`."""
        self._kv = kv
        self._policy = policy
        self._counter = policy if isinstance(policy, CountsTokens) else None
        self._admission = admission
        self._table = SequenceTable(max_num_seqs, max_model_len)
        limits = prefill_limits or PrefillLimits()
        self._budget = TokenBudget(self._table, max_num_batched_tokens, limits)
        self._pins = PinnedPrefixes(kv)
        self._prefixes = PrefixCache(self._table, kv, hasher, self._pins, enable_prefix_caching)
        self._builder = PlanBuilder(self._table, kv)
        self._outputs = OutputCollector()
        self._recovery = Recovery(self._table, kv, recovery_costs)
        self._roster = Roster(
            self._table, kv, self._builder, self._outputs, policy, self._recovery, self._pins
        )
        self._speed = PrefillSpeed()
        self._deadlines = Deadlines(self._prefixes.num_uncached)
        beams = BeamIntake(self._table, kv, self._builder, self._roster)
        self._intake = ResultIntake(
            self._table, kv, self._prefixes, self._roster, self._recovery, self._outputs, beams
        )
        self._num_groups_added = 0
        self._prompt_tokens_total = 0
        self._cached_tokens_total = 0
        self._steps_total = 0

    # --- requests come and go -------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if it could never be served by this engine."""
        max_total = self._admission.max_total_tokens(request)
        self._check_priority(request)
        if request.pin_seconds is not None:
            self._pins.check(request)
        tokens = np.concatenate((request.prompt_token_ids, request.output_token_ids))
        tokens = tokens.astype(np.int32, copy=False)
        root, names = self._prefixes.name_prompt(request.salt, tokens)
        for samples in self._admission.split(request, max_total):
            group = SequenceGroup(request, self._num_groups_added, root, max_total)
            self._num_groups_added += 1
            first, *unborn = samples
            group.sequences.append(Sequence(group, first, tokens, list(names)))
            if request.beams is None:
                group.unborn = tuple(unborn)
            else:
                group.beams = new_beam_group(request, request.beams, max_total)
            self._roster.queue(group)
            self._deadlines.watch(group, self._speed.last_known)

    def _check_priority(self, request: EngineRequest) -> None:
        if request.scheduling.priority and not self._policy.uses_priority:
            raise RequestError(
                f"priority is {request.scheduling.priority}, but this engine's scheduling_policy "
                "does not look at priorities: leave it out, or start with priority or two_level"
            )

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        """The prompt of an open request goes on with `token_ids`, int32 [N]; `is_last` ends it. One
        that has ended meanwhile is ignored. RequestError if it is not open, or grows too long."""
        group = self._roster.groups.get(handle)
        if group is None:
            return
        length = len(group.request.prompt_token_ids) + len(token_ids)
        max_total = self._admission.max_total_of_prompt(group.request, length)
        prompt = np.concatenate((group.request.prompt_token_ids, token_ids)).astype(np.int32)
        group.request = replace(group.request, prompt_token_ids=prompt, is_open=not is_last)
        if is_last:
            group.max_total_tokens = max_total
        sequence = group.sequences[0]
        if sequence.slot >= 0:
            self._table.extend(sequence.slot, token_ids)
            self._builder.extend(sequence.slot, token_ids)
            if is_last:
                self._table.close(sequence.slot, max_total)
        else:
            sequence.token_ids = prompt
        if group.state is GroupState.PARKED and (is_last or length > 1):
            self._roster.wake(group)

    def abort(self, handle: int) -> None:
        """End one sequence, whatever its state; its finish leaves with the next output."""
        self._roster.abort(handle)

    def unpin(self, handle: int) -> bool:
        """Let the prefix go that this request pinned; whether there was one."""
        return self._pins.release(handle)

    def pins(self, now: float) -> tuple[PinnedPrefix, ...]:
        """The prefixes that are held."""
        return self._pins.list(now)

    # --- planning -------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now`: seconds."""
        table, mark = self._table, self._kv.mark()
        self._pins.expire(now)
        self._drop_late(self._deadlines.pop_late(now, self._prefill_speed(now)))
        slots, tokens, was_preempted = self._give_blocks(*self._budget.choose_running())
        while was_preempted and not len(slots):  # the budget was theirs that are preempted now
            slots, tokens, was_preempted = self._give_blocks(*self._budget.choose_running())
        if not was_preempted:
            slots, tokens = self._admit_waiting(slots, tokens, now)
        if not len(slots):
            return None
        self._count(slots, tokens, now)
        starts = table.num_computed.copy()
        self._advance(slots, tokens)
        plan = self._builder.build(slots, tokens)
        step = InFlight(
            plan.step_id,
            table.generation.copy(),
            starts,
            table.sequences.copy(),
            mark,
            self._recovery.slots_swapped_in(),
        )
        self._intake.expect(step)
        return plan

    def _prefill_speed(self, now: float) -> float:
        """By which requests are dropped; 0.0, which drops nobody before time, while nothing runs:
        a wrong estimate must not keep away those who would correct it."""
        return self._speed.tokens_per_s(now) if self._roster.running else 0.0

    def _drop_late(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            message = (
                f"the first token cannot come within {group.request.scheduling.deadline_s:g} s of "
                "the request's arrival (deadline_s), so its prompt was not computed: send it "
                "again when the engine has less to do, or allow more time"
            )
            self._roster.fail(group, message, FinishReason.DEADLINE)

    def _count(self, slots: Slots, tokens: Slots, now: float) -> None:
        """Tell those who measure what a step computes."""
        table = self._table
        self._steps_total += 1
        of_prompts = table.num_computed[slots] < table.num_prompt[slots]
        self._speed.step_planned(now, int(tokens[of_prompts].sum()))
        if self._counter is not None:
            self._counter.count_tokens(table.account[slots], tokens)

    def _give_blocks(self, slots: Slots, tokens: Slots) -> tuple[Slots, Slots, bool]:
        """Allocate for the chosen tokens; preempt from the back of the order while short."""
        starts = self._table.num_computed[slots]
        if self._kv.grow(slots, starts, starts + tokens):
            return slots, tokens, False
        chosen = dict(zip(slots.tolist(), tokens.tolist(), strict=True))
        for group in list(self._roster.running):
            # One that is not running any more was preempted for one before it.
            while group.state is GroupState.RUNNING and not self._grow_group(group, chosen):
                if not self._make_room(is_last_resort=len(self._roster.running) == 1):
                    self._roster.preempt(self._roster.running[-1])
        kept = [slot for slot in chosen if self._table.live[slot]]
        counts = [chosen[slot] for slot in kept]
        return np.array(kept, np.int64), np.array(counts, np.int64), True

    def _make_room(self, *, is_last_resort: bool) -> bool:
        """Take blocks from who does not compute; whether there was anyone."""
        return self._roster.park_one() or (is_last_resort and self._pins.release_one())

    def _grow_group(self, group: SequenceGroup, chosen: dict[int, int]) -> bool:
        slots = np.array([s.slot for s in group.sequences if s.slot in chosen], np.int64)
        starts = self._table.num_computed[slots]
        tokens = np.array([chosen[int(slot)] for slot in slots], np.int64)
        return self._kv.grow(slots, starts, starts + tokens)

    def _admit_waiting(self, slots: Slots, tokens: Slots, now: float) -> tuple[Slots, Slots]:
        """Admit waiting groups in order until one does not fit; it holds back all after it. They
        compute with tokens that are left, or that running prompts after them had been given."""
        if not len(self._policy):
            return slots, tokens
        if self._roster.num_free_slots <= 0 and not self._roster.park_one():
            return slots, tokens
        step = self._budget.open(slots, tokens)
        while group := self._policy.first(step.may_start, self._prefixes.num_uncached):
            if self._deadlines.is_late(group, now, self._prefill_speed(now)):
                self._drop_late([group])
                continue
            if any(sequence.num_pending for sequence in group.sequences):
                break
            if self._has_nothing_to_compute(group):
                self._roster.park(group)
                continue
            budget = step.offered_to(group)
            chunks = self._try_admit(group, budget)
            is_short = budget > 0 and not chunks
            if is_short and self._make_room(is_last_resort=not self._roster.running):
                continue
            if not chunks:
                break
            self._roster.start_running(group)
            step.admit(chunks)
        return step.chosen()

    def _has_nothing_to_compute(self, group: SequenceGroup) -> bool:
        """Whether all but the last token of an open prompt is in the cache or the host already."""
        if not group.request.is_open:
            return False
        sequence = group.sequences[0]
        if sequence.swapped is not None:
            num_cached = sequence.swapped.num_tokens
        else:
            num_cached = self._prefixes.lookup(sequence).num_tokens
        return num_cached >= len(sequence.token_ids) - 1

    def _try_admit(self, group: SequenceGroup, budget: int) -> list[tuple[int, int]]:
        """(slot, tokens) of each sequence of the group, or nothing at all if it does not fit."""
        if budget <= 0 or group.num_slots > self._roster.num_free_slots:
            return []
        if group.sequences[0].swapped is not None:
            return self._try_swap_in(group, budget)
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

    def _enter(self, sequence: Sequence, budget: int) -> tuple[int, int] | None:
        """Give the sequence a slot that starts with its cached prefix, and blocks for as many
        tokens as the budget allows. Its slot and these tokens, or None if there is no room."""
        hit = self._prefixes.lookup(sequence)
        num_cached = hit.num_tokens
        num_ready = len(sequence.token_ids) - sequence.group.request.is_open
        end = min(num_ready, num_cached + budget)
        if not self._has_room(self._kv.prefixes.num_blocks_to_enter(hit, end)):
            return None
        slot = self._table.enter(sequence, num_cached)
        slots = np.array([slot], np.int64)
        self._kv.enter(slot, hit)
        self._pins.note_hit(hit, sequence)
        if not self._kv.grow(slots, slots * 0 + num_cached, slots * 0 + end):
            raise EngineError("an admission was given fewer blocks than were counted for it")
        self._prefixes.publish_to(slot, end)
        return slot, end - num_cached

    def _has_room(self, num_blocks: int) -> bool:
        pool = self._kv.pool
        headroom = pool.num_blocks // NUM_BLOCKS_PER_HEADROOM if self._roster.running else 0
        return num_blocks + headroom <= pool.num_available

    def _try_swap_in(self, group: SequenceGroup, budget: int) -> list[tuple[int, int]]:
        """As `_try_admit`, for a group whose K/V wait in the host."""
        counts = self._recovery.plan_swap_in(group, budget)
        if not self._has_room(self._recovery.num_blocks_to_swap_in(group, counts)):
            return []
        chunks = self._recovery.swap_in(group, counts)
        for slot, _ in chunks:
            self._prefixes.publish_to(slot, int(self._table.num_computed[slot]))
        self._note_admission(group, 0)
        return chunks

    def _undo_enter(self, group: SequenceGroup, mark: int) -> None:
        self._kv.retract(mark)
        entered = [sequence for sequence in group.sequences if sequence.slot >= 0]
        self._kv.forget_updates({sequence.slot for sequence in entered})
        for sequence in entered:
            self._kv.free(sequence.slot)
            self._table.leave(sequence)
        self._kv.forget_copies()

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
        table.num_total[reached] += table.draws[reached]
        for group in self._roster.branching:
            self._fork_unborn(group)
        self._roster.branching = [group for group in self._roster.branching if group.may_branch]

    def _fork_unborn(self, group: SequenceGroup) -> None:
        table = self._table
        source = group.sequences[0]
        src = source.slot
        if table.num_total[src] == table.num_known[src]:
            return  # its prompt is not computed yet
        for sample in group.unborn:
            sequence = branch_off(source, sample, table, self._kv)
            table.num_total[sequence.slot] += 1
            group.sequences.append(sequence)
            self._builder.fork(src, sequence.slot, sample)
        group.unborn = ()

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> EngineOutput:
        """Take in the oldest planned step's result; what it and aborts since gave to clients."""
        self._intake.apply(result)
        self._speed.step_ended(result.seconds)
        return self._outputs.drain()

    def fail_running(self, message: str) -> EngineOutput:
        """Take in that the steps in flight are lost: requests that were in them fail, those that
        wait do not, and nothing that was cached is trusted any more."""
        self._intake.lose_all()
        self._speed.steps_lost()
        for group in list(self._roster.running):
            self._roster.fail(group, message)
        self._roster.forget_swapped()
        self._pins.release_all()
        self._builder.leave_all()
        self._kv.pool.drop_cached()
        self._kv.settle(self._kv.mark())
        return self._outputs.drain()

    # --- readings -------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended, or its end has not been reported yet."""
        return bool(self._roster.groups) or self._outputs.has_any

    def awaits_prompt(self, handle: int) -> bool:
        """Whether this is an open request that may be extended; not once it has ended."""
        group = self._roster.groups.get(handle)
        return group is not None and group.request.is_open

    @property
    def waits_for_input(self) -> bool:
        """Whether a step could do nothing before some prompt goes on."""
        return (
            all(group.request.is_open for group in self._roster.groups.values())
            and not len(self._policy)
            and not self._outputs.has_any
            and not self._table.todo().any()
        )

    def running_handles(self) -> npt.NDArray[np.int64]:
        """Of the sequences that have a slot: [number of them]."""
        return self._table.handle[self._table.live]

    def flush(self) -> EngineOutput:
        """What aborts gave to clients, when there is no result to carry it."""
        return self._outputs.drain()

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(self._policy),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_table_entries=self._kv.num_table_entries,
            num_tokens_in_used_blocks=int(self._table.num_computed[self._table.live].sum()),
            preempted_total=self._roster.preempted_total,
            num_host_blocks=self._kv.host.num_blocks,
            num_used_host_blocks=self._kv.host.num_used,
            swapped_out_total=self._recovery.swapped_out_total,
            swapped_in_total=self._recovery.swapped_in_total,
            prompt_tokens_total=self._prompt_tokens_total,
            cached_tokens_total=self._cached_tokens_total,
            steps_total=self._steps_total,
        )

    def check_invariants(self) -> None:
        """Raise EngineError if bookkeeping and queues disagree; for tests and debugging."""
        self._kv.check_invariants()
        self._roster.check_invariants()
