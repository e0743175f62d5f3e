"""Decides, with integers only, which sequences compute how many tokens in the next step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quire.base.errors import QuireError, RequestError
from quire.base.telemetry.engine_stats import SchedulerStats
from quire.base.telemetry.flight.record import FlightRecorder
from quire.config.feasibility import Feasibility
from quire.config.resolved import ResolvedScheduler
from quire.plan.grammar import Grammar
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler.admission import Admission
from quire.plan.scheduler.allocation import Allocation
from quire.plan.scheduler.beams.intake import BeamIntake
from quire.plan.scheduler.constraints.masks import LateMasks
from quire.plan.scheduler.constraints.unsent import Question, UnsentTokens, Verdict
from quire.plan.scheduler.deadlines import Deadlines
from quire.plan.scheduler.drafts import ChosenDrafts, DraftProposer, Drafts
from quire.plan.scheduler.intake import Openings, RequestIntake, Watches
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.loads import LOAD_SECONDS, Loads
from quire.plan.scheduler.outputs import OutputCollector
from quire.plan.scheduler.pins import PinnedPrefixes
from quire.plan.scheduler.plan_builder import PlanBuilder
from quire.plan.scheduler.policies.policy import CountsTokens, Policy
from quire.plan.scheduler.policies.spare import SpareLast
from quire.plan.scheduler.prefix import PrefixCache
from quire.plan.scheduler.readings.records import Records
from quire.plan.scheduler.readings.step_log import StepLog
from quire.plan.scheduler.readings.view import JUST_NOW_S, view_of, viewed_steps
from quire.plan.scheduler.recovery import Recovery
from quire.plan.scheduler.results import ResultIntake
from quire.plan.scheduler.roster import Roster
from quire.plan.scheduler.sequence import GroupState, SequenceGroup
from quire.plan.scheduler.state import SchedulerState, Tickets
from quire.plan.scheduler.states.kept import KeptStates
from quire.plan.scheduler.table import SequenceTable
from quire.plan.scheduler.token_budget import TokenBudget
from quire.plan.speculation import DraftMethods
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import ExtendPrompt
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.status import EngineView, PreemptionCause, RequestFacts
from quire.protocol.step import IntArray, LateInput, StepPlan, StepResult

__all__ = ["Scheduler"]

Slots = npt.NDArray[np.int64]

NOTHING_MADE: Mapping[int, IntArray] = MappingProxyType({})


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
        feasibility: Feasibility,
        settings: ResolvedScheduler,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        recovery_costs: RecoveryCosts | None = None,
        proposer: DraftProposer | None = None,
        methods: DraftMethods | None = None,
        vocab_size: int = 2**31,
        watches: Watches | None = None,
        whole_prompts: bool = False,
        load_seconds: float = LOAD_SECONDS,
        flight: FlightRecorder | None = None,
    ) -> None:
        """recovery_costs: costs that decide which preempted groups are swapped to the host blocks
        of `kv`.
        proposer: source of drafts that are all verified. methods: methods that make drafts without
        a proposer; as many are verified as pay. vocab_size: token ids from there on
        stand for media.
        watches: tells the requests whose tokens wait for verdicts before clients get them; None: no
        request. whole_prompts: a step computes all of a prompt or nothing; none is longer than a
        step. load_seconds: time that a prompt waits for blocks of a source; see `LOAD_SECONDS`.
        flight: log of steps; None for one in this process's memory."""
        self.flight = flight or FlightRecorder()
        queue = SpareLast(policy)
        table, outputs = SequenceTable(settings.max_num_seqs, max_model_len), OutputCollector()
        pins = PinnedPrefixes(kv, is_cache_on=enable_prefix_caching)
        prefixes = PrefixCache(table, kv, hasher, pins, enable_prefix_caching)
        roster, builder = Roster(queue), PlanBuilder(table, kv)
        self.state = state = SchedulerState(
            kv=kv,
            table=table,
            roster=roster,
            builder=builder,
            pins=pins,
            prefixes=prefixes,
            states=KeptStates(table, kv) if prefixes.keeps_states else None,
            recovery=Recovery(table, kv, recovery_costs, builder.is_entering),
            deadlines=Deadlines(prefixes.num_uncached),
            outputs=outputs,
            unsent=UnsentTokens(table, outputs),
            tickets=Tickets(kv.ticket_numbers, self.flight),
            records=Records(table, roster, kv),
            flight=self.flight,
        )
        self._budget = TokenBudget(table, settings, state.states, whole_prompts=whole_prompts)
        max_tokens = settings.max_num_batched_tokens
        self._drafts = Drafts(table, kv, proposer, max_tokens, methods, vocab_size)
        self._lifecycle = Lifecycle(state, self._drafts.ended)
        serves = self._drafts.serves
        self._requests = RequestIntake(state, self._lifecycle, feasibility, watches, serves)
        self._allocation = Allocation(state)
        self._loads = Loads(state, self._lifecycle, self._allocation, recovery_costs, load_seconds)
        self._admission = Admission(
            state, self._lifecycle, self._budget, self._allocation, self._loads
        )
        beams = BeamIntake(state, self._lifecycle)
        self._results = ResultIntake(state, self._lifecycle, beams, self._drafts.verified)
        self._log = StepLog(state, queue if isinstance(policy, CountsTokens) else None)
        self._num_in_flight = 0
        self._masks = LateMasks(table)
        self._has_grammars = False  # ever: a plain step is not to pay for masks

    # --- requests come and go -------------------------------------------------------------------

    def add(self, request: EngineRequest) -> Openings:
        """Queue a request. RequestError if it could never be served by this engine. For each ticket
        that is returned `grammar_opened` or `adapter_opened` follows, or `opening_refused`."""
        self._has_grammars |= request.grammar is not None
        openings = self._requests.add(request)
        self._log.added(request)
        return openings

    def grammar_opened(self, ticket: int, grammar: Grammar) -> None:
        """Unblock a group whose grammar has been compiled; nothing happens if the group is gone."""
        group = self.state.tickets.group_of(ticket)
        if group is not None:
            group.grammar = grammar
            self._lifecycle.end_ticket(ticket)

    def adapter_opened(self, ticket: int, slot: int) -> None:
        """Unblock a group whose adapter is in this slot; nothing happens if the group is gone."""
        group = self.state.tickets.group_of(ticket)
        if group is not None:
            group.adapter = slot
            self._lifecycle.end_ticket(ticket)

    def adapter_slots_in_use(self) -> set[int]:
        """Slots of groups that have not ended."""
        return {group.adapter for group in self.state.roster.groups.values() if group.adapter}

    def opening_refused(self, ticket: int, error: QuireError) -> None:
        """Fail a group whose grammar is invalid, or whose adapter cannot be used."""
        group = self.state.tickets.group_of(ticket)
        if group is not None:
            is_request_fault = isinstance(error, RequestError)
            self._lifecycle.fail(group, str(error), is_request_fault=is_request_fault)

    def abort(self, handle: int) -> None:
        """End one sequence, whatever its state; its finish leaves with the next output."""
        self._lifecycle.abort(handle)

    # --- between steps --------------------------------------------------------------------------

    def extend(self, op: ExtendPrompt) -> bool:
        """Append to the prompt of an open request; see `ExtendPrompt`. Return whether the request
        is still there."""
        return self._requests.extend(op.handle, op.token_ids, is_last=op.is_last)

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Forget all cached prefixes but pinned ones, those on the disk too; `reset_running`:
        compute running requests again."""
        if reset_running:
            for group in self._lifecycle.holders():
                self._lifecycle.preempt(group, PreemptionCause.RESET, may_swap=False)
        self.state.kv.drop_cached()
        self.state.kv.sources.wipe()

    def vacate(self, *, has_new_weights: bool = False) -> None:
        """Take in that the device has lost all K/V and rows: all groups wait to be computed again.
        No step may be in flight."""
        state = self.state
        self._lifecycle.vacate()
        state.pins.release_all()
        state.builder.leave_all()
        state.kv.drop_cached()
        state.kv.settle(state.kv.mark())
        for move in state.kv.sources.lose_moves():
            self.moved(move.ticket, move.all_lost)
        if has_new_weights:
            state.kv.sources.retire()
            state.prefixes.forget_weights(set(state.roster.groups.values()))

    def hold_admission(self, *, is_held: bool) -> None:
        """Admit only groups that were admitted before, until this is undone."""
        self.state.waiting.is_held = is_held

    def abort_all(self, message: str) -> None:
        """End every sequence, and say why."""
        for handle in list(self.state.roster.groups):
            self._lifecycle.abort(handle, message)

    @property
    def has_admitted(self) -> bool:
        """True if any request that was admitted goes on without its client's help."""
        return any(
            group.was_admitted and not (group.request.is_open and group.state is GroupState.BLOCKED)
            for group in self.state.roster.groups.values()
        )

    # --- planning -------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. `now`: seconds."""
        self.state.records.begin(now, self._admission.shortage)
        plan = self._plan(now)
        self.state.records.end_plan()
        return plan

    def _plan(self, now: float) -> StepPlan | None:
        state = self.state
        mark = state.kv.mark()
        state.pins.expire(now)
        self._loads.expire(now)
        state.kv.sources.expire(now)
        self._admission.drop_late(now)
        self._admission.take_from_spare()
        slots, tokens, was_preempted = self._choose_running()
        if was_preempted:
            self._admission.skip()
        elif len(state.waiting):
            slots, tokens = self._admission.admit(slots, tokens, now)
        if not len(slots) and not self._has_news_to_fetch:
            self._drafts.idle()
            return None
        self._budget.planned()
        state.recovery.note_planned(slots)
        of_prompts = state.table.num_computed[slots] < state.table.num_prompt[slots]
        prefill = int(tokens[of_prompts].sum()) if of_prompts.any() else 0
        self._log.count(slots, tokens, of_prompts, prefill, now)
        starts = state.table.num_computed.copy()
        drafts = self._drafts.choose(slots, tokens)
        self._log.note(
            slots,
            tokens,
            drafts,
            of_prompts,
            prefill,
            now,
            num_in_flight=self._num_in_flight,
            preempted_total=self._lifecycle.preempted_total,
            shortage=self._admission.shortage,
        )
        sampling = self._advance(slots, tokens, drafts)
        plan = state.builder.build(slots, tokens, drafts)
        self._results.expect(plan.step_id, starts, mark, drafts)
        self._drafts.planned(now, tokens, drafts, self._num_in_flight)
        if self._has_grammars:
            self._masks.expect(plan, sampling)
        self._num_in_flight += 1
        return plan

    @property
    def awaits_results(self) -> bool:
        """True if the next step is better planned when the results in flight have been applied:
        drafts follow the tokens that they bring, and what comes meanwhile need not wait for a
        further step of groups on spare capacity."""
        if not self._num_in_flight:
            return False
        return self._runs_spare_alone or self._drafts.await_results()

    @property
    def _runs_spare_alone(self) -> bool:
        """True if all groups that run, and all that wait, are on spare capacity."""
        running = self.state.roster.running
        has_spare = bool(running) and running[0].is_spare  # these stand behind all others
        return has_spare and not self.state.waiting.num_urgent

    @property
    def _has_news_to_fetch(self) -> bool:
        """Return whether a step without computation is needed: to start copies, or to learn of
        running copies when no other step will tell."""
        kv = self.state.kv
        return kv.has_copies_to_start or (kv.transfers.are_under_way and not self._num_in_flight)

    def _choose_running(self) -> tuple[Slots, Slots, bool]:
        """Return running slots that compute, and tokens for each, with their blocks; and whether
        groups were preempted for these."""
        was_preempted = False
        has_spare = bool(self.state.table.num_spare or self.state.waiting.num_spare)
        while True:
            chosen = self._budget.choose_running(has_spare=has_spare)
            slots, tokens, is_short = self._give_blocks(*chosen)
            was_preempted |= is_short
            if self._budget.is_spare_paused and not self._budget.are_in_prompts(slots):
                has_spare = False  # the prompt gets nothing in this step: nobody sits it out
                continue
            if len(slots) or not is_short or self.state.kv.num_orphaned:
                return slots, tokens, was_preempted and (is_short or len(slots) > 0)
            # The budget was theirs that are preempted now: others may have it.

    def _give_blocks(self, slots: Slots, tokens: Slots) -> tuple[Slots, Slots, bool]:
        """Allocate blocks for the chosen tokens; preempt from the back of the order while there are
        too few. A sequence that would need blocks into which copies are running sits this step
        out."""
        state, table = self.state, self.state.table
        ends = table.num_computed[slots] + tokens
        if state.kv.grow(slots, table.first_query(slots), ends):
            return slots, tokens, False
        chosen = dict(zip(slots.tolist(), tokens.tolist(), strict=True))
        for group in list(state.roster.running):
            # One that is not running any more was preempted for one before it.
            while group.state is GroupState.RUNNING and not self._grow_group(group, chosen):
                if not self._lifecycle.make_room(group) and group.state is GroupState.RUNNING:
                    for sequence in group.sequences:
                        chosen.pop(sequence.slot, None)
                    break
        kept = [slot for slot in chosen if table.live[slot]]
        counts = [chosen[slot] for slot in kept]
        return np.array(kept, np.int64), np.array(counts, np.int64), True

    def _grow_group(self, group: SequenceGroup, chosen: dict[int, int]) -> bool:
        slots = np.array([s.slot for s in group.sequences if s.slot in chosen], np.int64)
        tokens = np.array([chosen[int(slot)] for slot in slots], np.int64)
        table = self.state.table
        ends = table.num_computed[slots] + tokens
        return self.state.kv.grow(slots, table.first_query(slots), ends)

    def _advance(self, slots: Slots, tokens: Slots, drafts: ChosenDrafts) -> Slots:
        """Count the step as done: counts are upper bounds from now on. Samples branch off here.
        Return the slots that sample, without the new branches."""
        table, roster = self.state.table, self.state.roster
        table.num_computed[slots] += tokens
        self.state.prefixes.publish(slots)
        if self.state.states is not None:
            self.state.states.save(slots, drafts.slots, drafts.counts)
        reached = slots[table.num_computed[slots] == table.num_total[slots]]
        table.num_total[reached] += table.draws[reached]
        if len(drafts.slots):
            table.draft(drafts.slots, drafts.counts)
        if roster.branching:
            self._lifecycle.branch_ready()
        if roster.arriving:
            self._lifecycle.block_idle()
        return reached

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> EngineOutput:
        """Apply the result of the oldest planned step. Return the outputs of it and of aborts
        since."""
        self._num_in_flight -= 1
        self._results.apply(result)
        self._drafts.applied(result.seconds)
        num_tokens = len(result.token_ids)
        self.flight.ended(result.seconds, num_tokens, self._drafts.totals.accepted)
        for ticket in result.done:
            self._lifecycle.end_ticket(ticket)
        for failure in result.failed_tickets:
            self._lifecycle.end_ticket(failure.ticket, frozenset(failure.blocks.tolist()))
        if not self._num_in_flight and (events := self.state.kv.events) is not None:
            events.settle()
        self.state.speed.step_ended(result.seconds)
        return self.state.outputs.drain()

    # --- moves to the disk and back -------------------------------------------------------------

    def take_moves(self) -> list[BlockMove]:
        """Return the moves to start now that the plans made so far have been given; once. Those
        whose device blocks a plan has yet to copy out wait for it."""
        kv = self.state.kv
        return [] if kv.has_copies_to_start else kv.sources.take_moves()

    def note_uses(self) -> None:
        """Have the disk know how often its blocks were used, before the engine ends."""
        self.state.kv.sources.note_uses(1)

    def take_cancelled(self) -> list[int]:
        """Return tickets of moves to cancel, once: `moved` follows soon."""
        return self.state.kv.sources.take_cancelled()

    def moved(self, ticket: int, outcome: MoveOutcome) -> None:
        """Take in that a move has ended, well or not."""
        self.state.kv.sources.moved(ticket, outcome)
        self._lifecycle.end_ticket(ticket, frozenset(outcome.lost.tolist()))

    @property
    def awaits_drafts_of(self) -> int | None:
        """The oldest step in flight, if its late input depends on drafts that a model makes."""
        step_id = self._results.oldest
        return step_id if step_id is not None and self._masks.follow_model(step_id) else None

    def late_input(self, made: Mapping[int, IntArray] = NOTHING_MADE) -> LateInput | None:
        """Return the late input of the oldest step in flight, whose tokens before are all known;
        None if it needs none, or `late_input_given` was called. made: drafts of a model, by slot,
        if it depends on them."""
        step_id = self._results.oldest
        return None if step_id is None else self._masks.of_step(step_id, made)

    def late_input_given(self, step_id: int) -> None:
        """The executor has the late input of a step."""
        self._masks.given(step_id)

    def release_late_inputs(self) -> list[LateInput]:
        """Return the late inputs that lost steps in flight still wait for, so that they end."""
        return self._masks.release()

    def fail_running(self, message: str) -> EngineOutput:
        """Take in that the steps in flight are lost. Their requests fail, waiting ones do not, and
        no cached block is trusted any more."""
        self._results.lose_all()
        self._drafts.lost()
        self.flight.lost()
        self.state.speed.steps_lost()
        self._num_in_flight = 0
        self._lifecycle.lose_steps(message)
        self.state.pins.release_all()
        self.state.builder.leave_all()
        self.state.kv.drop_cached()
        self.state.kv.settle(self.state.kv.mark())
        return self.state.outputs.drain()

    # --- tokens that wait for verdicts ----------------------------------------------------------

    def questions(self) -> list[Question]:
        """Return the questions about watched sequences, each once; a verdict follows on each
        sequence that has not ended before."""
        return self.state.unsent.questions()

    def forgotten(self) -> list[int]:
        """Handles of watched sequences that have ended. Once."""
        return self.state.unsent.forgotten()

    def judge(self, verdict: Verdict) -> None:
        """Take in the answer to a question; nothing happens if the sequence has ended."""
        self._results.judge(verdict)

    @property
    def waits_for_verdicts(self) -> bool:
        """True if verdicts are to come."""
        return self.state.unsent.has_open_questions

    # --- readings -------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True if any request has not ended, or its end has not been reported yet, or copies that
        were made for one are under way."""
        state = self.state
        return (
            bool(state.roster.groups) or state.outputs.has_any or state.kv.transfers.are_under_way
        )

    @property
    def uses_priority(self) -> bool:
        """True if requests may name a priority."""
        return self.state.waiting.uses_priority

    @property
    def waits_for_input(self) -> bool:
        """True if a step could do nothing before some prompt goes on."""
        state = self.state
        may_wait = state.waiting.is_held
        return (
            all(
                group.state is GroupState.BLOCKED or (may_wait and not group.was_admitted)
                for group in state.roster.groups.values()
            )
            and not state.outputs.has_any
            and not state.kv.transfers.are_under_way
        )

    def running_handles(self) -> npt.NDArray[np.int64]:
        """Handles of the sequences that have a slot: [number of them]."""
        return self.state.table.handle[self.state.table.live]

    def flush(self) -> EngineOutput:
        """Return the outputs of aborts, when there is no result to carry them."""
        return self.state.outputs.drain()

    def block_states(self) -> bytes:
        """Return the state of each KV block, as `Report.blocks` has it."""
        states = self.state.kv.pool.states()
        for block in self.state.pins.blocks:
            states[block] = ord("p")
        return bytes(states)

    def facts(
        self, tenant: str, request_ids: Collection[str], now: float
    ) -> tuple[RequestFacts, ...]:
        """See `Records.facts`."""
        return self.state.records.facts(tenant, request_ids, now, self._admission.shortage)

    def view(self, now: float, steps_s: float) -> EngineView:
        """Return the moment, for people. steps_s: age of the oldest steps to return."""
        steps = viewed_steps(self.flight, now, max(steps_s, JUST_NOW_S))
        return view_of(self.state, steps, steps_s, self._admission.shortage)

    def stats(self) -> SchedulerStats:
        pool, drafts = self.state.kv.pool, self._drafts.totals
        copied, disk = self.state.kv.sources.totals, self.state.kv.disk
        return SchedulerStats(
            num_running=len(self.state.roster.running),
            num_waiting=len(self.state.waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_pins=len(self.state.pins),
            num_pinned_blocks=self.state.pins.num_blocks,
            num_table_entries=self.state.kv.num_table_entries,
            num_tokens_in_used_blocks=int(
                self.state.table.num_computed[self.state.table.live].sum()
            ),
            preempted_total=self._lifecycle.preempted_total,
            num_host_blocks=self.state.kv.host.num_blocks,
            num_used_host_blocks=self.state.kv.host.num_used,
            swapped_out_total=self.state.recovery.swapped_out_total,
            swapped_in_total=self.state.recovery.swapped_in_total,
            num_named_host_blocks=self.state.kv.host.num_named,
            blocks_stored_total=copied.stored,
            blocks_removed_total=copied.removed,
            blocks_unstored_total=copied.unstored,
            blocks_loaded_total=copied.loaded,
            blocks_lost_total=copied.lost,
            late_loads_total=self._loads.late_total,
            loads_started_total=self._loads.started_total,
            loads_declined_total=self._loads.declined_total,
            **({} if disk is None else disk.stats()),
            prompt_tokens_total=self._allocation.prompt_tokens_total,
            cached_tokens_total=self._allocation.cached_tokens_total,
            steps_total=self._log.steps_total,
            prefill_tokens_per_s=self.state.speed.last_known,
            drafted_rows_total=drafts.rows,
            draft_tokens_total=drafts.drafts,
            accepted_drafts_total=drafts.accepted,
            accepted_drafts_at=tuple(drafts.accepted_at),
        )

    def check_invariants(self) -> None:
        """Raise EngineError if bookkeeping and queues disagree; for tests and debugging."""
        self.state.kv.check_invariants()
        self._lifecycle.check_invariants()
