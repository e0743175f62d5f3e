"""The scheduler over the fake executor, with a check after whatever happens to them.

Plans and results are separate moves, so results arrive as late as a test wants them to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace

import numpy as np

from quire.base.errors import RequestError
from quire.config.memory.plan import FEWEST_DRAFTS
from quire.config.resolved import ResolvedScheduler
from quire.config.speculation import SpeculationSettings
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import (
    Feasibility,
    Policy,
    Scheduler,
    make_policy,
)
from quire.plan.scheduler.constraints.unsent import Question
from quire.plan.scheduler.policies.spare import SPARE_ACCOUNT
from quire.plan.speculation import DraftMethods
from quire.protocol import (
    BeamRules,
    EngineOutput,
    EngineRequest,
    FinishReason,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    StepPlan,
    StepResult,
)
from quire.protocol.adapters import AdapterRef
from quire.protocol.control import ExtendPrompt
from quire.protocol.sampling_params import RepetitionDetectionParams
from quire.protocol.step import NO_TICKET
from tests.executor.fake import FakeExecutor
from tests.kv_cache.fake_source import FakeSource, NameMirror
from tests.scheduler.expected import VOCAB, Asked, expected_beams, expected_output
from tests.scheduler.proposers import Guesses
from tests.scheduler.simulated_setup import Client, Judge, Setup

METHODS = SpeculationSettings("auto", 6, 1, 3)
OF_MODEL = SpeculationSettings("draft_model", 4, model="fake")
ADAPTERS = ("one", "other")
"""Digests of adapters, in the order of their slots."""


def repetition_of(repeats: tuple[int, int, int] | None) -> RepetitionDetectionParams | None:
    """The parameter of `Asked.repeats`."""
    if repeats is None:
        return None
    shortest, longest, count = repeats
    return RepetitionDetectionParams(longest, shortest, count)


def _adapter_ref(digest: str) -> AdapterRef:
    return AdapterRef(digest, f"adapters/{digest}", digest)


class Simulation:
    patience = 2
    """Steps in flight that each token of work may take."""

    def __init__(self, setup: Setup, judge: Judge | None = None) -> None:
        self.setup = setup
        self.judge = judge
        self.questions: deque[Question] = deque()
        settings = ResolvedScheduler(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            scheduling_policy=setup.policy,
            staging_queue_size=3,
            priority_ageing_s=4.0,
            **asdict(setup.prefill_limits),
        )
        self.policy: Policy = make_policy(settings)
        layout, methods = setup.layout, self._methods()
        self.kv = KVManager(
            layout,
            setup.num_blocks,
            setup.max_num_seqs,
            setup.max_model_len,
            setup.num_host_blocks,
            setup.num_checkpoints or 0,
            keeps_evicted=setup.keeps_evicted,
            sources=self._sources(),
        )
        self.mirror = NameMirror()
        if setup.keeps_evicted or setup.num_places is not None:
            self.kv.sources.subscribe(self.mirror.take)
        self.scheduler = Scheduler(
            kv=self.kv,
            hasher=BlockHasher(setup.block_size, b"test"),
            policy=self.policy,
            feasibility=Feasibility(
                layout,
                setup.num_blocks,
                setup.max_num_seqs,
                setup.max_num_batched_tokens,
                setup.max_model_len,
            ),
            settings=settings,
            max_model_len=setup.max_model_len,
            enable_prefix_caching=setup.enable_prefix_caching,
            recovery_costs=setup.recovery_costs if setup.num_host_blocks else None,
            proposer=self._guesses() if methods is None else None,
            watches=None if judge is None else judge.watches,
            methods=methods,
            vocab_size=VOCAB,
            load_seconds=setup.load_seconds,
        )
        self.executor = FakeExecutor(
            setup.model,
            num_blocks=setup.num_blocks,
            layout=layout,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            num_host_blocks=setup.num_host_blocks,
            poison=setup.poison,
            readers_fail=setup.readers_fail,
            ticket_steps=lambda ticket: setup.ticket_steps[ticket % len(setup.ticket_steps)],
            lose=lambda blocks: blocks[self._rng.random(len(blocks)) < setup.losses],
            num_checkpoints=setup.num_checkpoints or 0,
            breaks=lambda _: self._breaks(),
            draft=self._say,
            num_places=() if setup.num_places is None else (setup.num_places,),
            corrupt=lambda places: places[self._rng.random(len(places)) < setup.corruptions],
        )
        for slot, digest in enumerate(ADAPTERS):
            self.executor.put_adapter(slot, _adapter_ref(digest))
        self._rng = np.random.default_rng(setup.num_blocks)
        self.clients: dict[int, Client] = {}
        self.in_pieces: set[int] = set()
        self.arriving: dict[int, tuple[int, ...]] = {}  # what is still to come of open prompts
        self.opening: list[tuple[int, int]] = []  # tickets and slots of adapters to come
        self.step_seconds = 0.1
        self.in_flight: deque[Future[StepResult]] = deque()
        self.standing = np.zeros(setup.max_num_seqs, np.int64)
        self.num_steps = 0
        self.done: Counter[str] = Counter()  # what the plans asked for, to show what a walk met
        self.num_refused = 0
        self.lost: set[int] = set()
        self.now = 0.0

    def _sources(self) -> tuple[FakeSource, ...]:
        setup = self.setup
        if setup.num_places is None:
            return ()
        return (FakeSource(1, setup.num_places, setup.refusals, seed=setup.num_blocks),)

    def _methods(self) -> DraftMethods | None:
        settings = {"model": OF_MODEL, "methods": METHODS}
        guesses = self.setup.guesses
        return DraftMethods(settings[guesses]) if guesses in settings else None

    def _guesses(self) -> Guesses | None:
        setup = self.setup
        if not setup.max_drafts:
            return None
        seed = setup.max_num_seqs
        return Guesses(setup.model, setup.guesses, setup.max_drafts, setup.poison, seed)

    def _say(self, tokens: list[int]) -> list[int]:
        """Return drafts of a model: any number of right tokens, then wrong ones; now and then not
        as many as it was asked for."""
        if self._rng.random() < 0.3:
            tokens = tokens[: int(self._rng.integers(len(tokens) + 1))]
        num_right = int(self._rng.integers(len(tokens) + 1))
        said = [*tokens[:num_right], *((t + 1) % VOCAB for t in tokens[num_right:])]
        return [0 if token == self.setup.poison else token for token in said]

    def _prediction(self, whole: tuple[int, ...]) -> np.ndarray:
        """Return a client's prediction of an output: some tokens are right, others changed or left
        out."""
        if self.setup.guesses != "methods":
            return np.zeros(0, np.int32)
        changed = [t if self._rng.random() < 0.8 else int(self._rng.integers(VOCAB)) for t in whole]
        kept = [t for t in changed if self._rng.random() < 0.95 and t != self.setup.poison]
        return np.array(kept, np.int32)

    def _breaks(self) -> bool:
        is_broken = self.setup.breaks > 0 and self._rng.random() < self.setup.breaks
        self.done["broken"] += is_broken
        return is_broken

    # --- moves ---------------------------------------------------------------------------------

    def add(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int | None = 4,
        n: int = 1,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        repeats: tuple[int, int, int] | None = None,
        salt: str = "",
        resume_at: int = 0,
        lateness: float = 0.0,
        prompt_logprobs: int | None = None,
        scheduling: SchedulingParams | None = None,
        logprobs: int | None = None,
        beams: BeamRules | None = None,
        pin_seconds: float | None = None,
        pin_is_shared: bool = False,
        given: int | None = None,
        max_prompt_tokens: int | None = None,
        adapter: str = "",
        is_adapter_late: bool = False,
        message_ends: Iterable[int] = (),
    ) -> list[int]:
        """Handles, or nothing if the engine refuses. resume_at: output tokens it comes with. given:
        tokens of the prompt that it comes with if the others come later. adapter: one of
        `ADAPTERS`. is_adapter_late: it has its slot when `open_adapters` is called next."""
        prompt = tuple(prompt)
        self.now += 1
        first = len(self.clients)
        if n > 1 or max_tokens is None or given is not None or beams is not None:
            resume_at = 0
        asked = Asked(prompt, max_tokens or 1, stop, min_tokens, seed, 0, adapter, repeats)
        whole = self._uncut(asked)
        output = whole[: min(resume_at, len(whole) - 1)]
        request = EngineRequest(
            request_id=str(first),
            first_handle=first,
            prompt_token_ids=np.array(prompt[:given], np.int32),
            params=SamplingParams(
                max_tokens=max_tokens,
                n=n,
                min_tokens=min_tokens,
                repetition_detection=repetition_of(repeats),
                prompt_logprobs=prompt_logprobs,
                logprobs=logprobs,
            ),
            seed=seed,
            stop_token_ids=stop,
            output_token_ids=np.array(output, np.int32),
            arrival_time=self.now - lateness,
            salt=salt,
            scheduling=scheduling or SchedulingParams(),
            beams=beams,
            pin_seconds=pin_seconds,
            pin_is_shared=pin_is_shared,
            is_open=given is not None,
            max_prompt_tokens=max_prompt_tokens,
            prediction_token_ids=self._prediction(whole),
            adapter=_adapter_ref(adapter) if adapter else None,
            message_ends=np.array(list(message_ends), np.int32),
        )
        try:
            tickets = self.scheduler.add(request)
        except RequestError:
            self.num_refused += 1
            self.check()
            return []
        self.check()
        self.opening += [(ticket, ADAPTERS.index(adapter) + 1) for ticket in tickets.adapter]
        if not is_adapter_late:
            self.open_adapters()
        limit = self.scheduler.state.roster.groups[first].max_total_tokens - len(prompt)
        if given is not None:
            limit = min(max_tokens or 0, self.setup.max_model_len - len(prompt))
            self.arriving[first] = prompt[given:]
            self.in_pieces.add(first)
        for sample in range(n):
            own = replace(asked, max_tokens=limit, sample_index=sample)
            deadline_s = request.scheduling.deadline_s
            client = Client(own, output, first, deadline_s, beams, list(output))
            self.clients[first + sample] = client
        return list(range(first, first + n))

    def resume(
        self, prompt: Iterable[int], output: Iterable[int], max_tokens: int, stop: frozenset[int]
    ) -> None:
        """A request with any output at all; RequestError if the engine refuses it."""
        self.scheduler.add(
            EngineRequest(
                request_id="resumed",
                first_handle=len(self.clients),
                prompt_token_ids=np.array(prompt, np.int32),
                params=SamplingParams(max_tokens=max_tokens),
                seed=0,
                stop_token_ids=stop,
                output_token_ids=np.array(output, np.int32),
            )
        )

    def open_adapters(self) -> None:
        """Give all adapters that requests wait for their slots."""
        for ticket, slot in self.opening:
            self.scheduler.adapter_opened(ticket, slot)
            self.check()
        self.opening.clear()

    def abort(self, handle: int) -> None:
        self.scheduler.abort(handle)
        self.check()

    def extend(self, handle: int, count: int) -> None:
        """The next `count` tokens of an open prompt; the request ends with the last ones."""
        rest = self.arriving[handle]
        piece, rest = rest[:count], rest[count:]
        self.arriving[handle] = rest
        if not rest:
            del self.arriving[handle]
        try:
            self.scheduler.extend(ExtendPrompt(handle, np.array(piece, np.int32), not rest))
        except RequestError:
            self.arriving.pop(handle, None)
            self.num_refused += 1
            self.abort(handle)
        self.check()

    def unpin(self, handle: int) -> None:
        self.scheduler.state.pins.release(handle)
        self.check()

    def plan(self) -> bool:
        """Plan one more step, if the depth allows it; whether there was one."""
        if len(self.in_flight) >= self.setup.depth:
            return False
        if self.scheduler.awaits_results and self._rng.random() < 0.7:
            return False
        scheduler, table = self.scheduler, self.scheduler.state.table
        roster, transfers = scheduler.state.roster, scheduler.state.kv.transfers
        holders = [*roster.running, *(group for group in roster.blocked if group.is_coming_in)]
        oldest = min(holders, key=lambda group: group.key, default=None)
        is_decode = table.live & (table.todo() == 1)
        decoding = {
            (slot, int(table.generation[slot])): int(table.num_computed[slot])
            for slot in np.flatnonzero(is_decode & (table.account != SPARE_ACCOUNT)).tolist()
        }
        self.now += 0.1
        plan = scheduler.plan(self.now)
        self.check()
        if oldest is not None and not oldest.is_spare:
            assert oldest.has_slots or oldest.request.is_open, "the oldest group was preempted"
        if plan is None:
            is_done = not roster.groups or scheduler.waits_for_input
            is_done |= scheduler.state.outputs.has_any  # what aborts gave leaves first
            is_done |= scheduler.waits_for_verdicts
            assert self.in_flight or is_done, "nothing is planned, nothing runs"
            return False
        self._check_plan(plan)
        if len(decoding) <= self.setup.max_num_batched_tokens and not transfers.num_orphaned:
            for (slot, generation), computed in decoding.items():
                if table.generation[slot] == generation:
                    assert table.num_computed[slot] >= computed + 1, "a decode was starved"
        self.in_flight.append(self.executor.execute(plan))
        self.num_steps += 1
        self.done.update(
            steps=1,
            forks=len(plan.forks) + len(plan.start_fork_dst),
            blocks_copied=len(plan.copy_dst),
            blocks_swapped_out=len(plan.store_dst),
            blocks_swapped_in=len(plan.load_dst),
            drafts=len(plan.draft_slot),
            rewinds=len(plan.rewind_slot),
            blocks_offered=len(plan.store_ticket) - int((plan.store_ticket == NO_TICKET).sum()),
            states_saved=len(plan.save_slot),
            states_loaded=sum(row.checkpoint is not None for row in plan.enter),
            states_unnamed=len(self.kv.slots_with_unnamed_states),
        )
        return True

    def apply(self) -> bool:
        """Take in the oldest result; whether there was one."""
        if not self.in_flight:
            self._take(self.scheduler.flush())
            return False
        result = replace(self.in_flight.popleft().result(), seconds=self.step_seconds)
        if result.counts is not None:
            self.done["accepted"] += int(result.counts.sum()) - len(result.counts)
        self._take(self.scheduler.apply(result))
        self.check()
        return True

    def answer(self) -> bool:
        """Give the verdict on the oldest question; whether there was one."""
        self.questions.extend(self.scheduler.questions())
        if self.judge is None or not self.questions:
            return False
        self.scheduler.judge(self.judge.answer(self.questions.popleft()))
        self.check()
        return True

    def lose_steps(self) -> None:
        """The device gives up. Steps in flight never happen, and running requests fail."""
        self.in_flight.clear()
        self.executor.drop_queued()
        groups = self.scheduler.state.roster.groups
        self.lost |= {h for h, g in groups.items() if g.has_slots and not g.is_coming_in}
        self._take(self.scheduler.fail_running("the device is gone"))
        self.check()

    def drain(self) -> None:
        """Run until every request has ended, then check everything that was promised."""
        self.open_adapters()
        for handle in list(self.arriving):
            self.extend(handle, len(self.arriving[handle]))
        work = sum(
            (len(client.asked.prompt) + client.asked.max_tokens)
            * (client.beams.width if client.beams else 1)
            for client in self.clients.values()
            if client.finish is None
        )
        work *= 1 + max(self.setup.ticket_steps)
        bound = self.num_steps + 50 + self.patience * self.setup.depth * work
        while self.scheduler.has_unfinished or self.in_flight:
            while self.plan():
                pass
            self.apply()
            while self.answer():
                pass
            assert self.num_steps <= bound, f"no end: {self.scheduler.stats()}"
        for handle, client in self.clients.items():
            self._check_client(handle, client)
        self.scheduler.state.pins.release_all()
        self.check()
        assert self.scheduler.stats().num_used_blocks == 0
        assert self.scheduler.stats().num_used_host_blocks == 0
        assert self.scheduler.state.table.num_free == self.setup.max_num_seqs
        assert self.scheduler.state.roster.branching == []

    # --- checks --------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.mirror.check(self.kv)
        table = self.scheduler.state.table
        drafted = np.zeros(self.setup.max_num_seqs, np.int64)
        for step in self.scheduler._results._in_flight:
            if step.drafts is not None:
                is_same = step.generation == table.generation
                drafted[is_same] += step.drafts[is_same]
        assert (table.num_drafted == drafted)[table.live].all(), "counts that may be too large"

    def _check_plan(self, plan: StepPlan) -> None:
        copied = plan.copy_dst.tolist()
        assert len(set(copied)) == len(copied), "two copies into one block"
        assert not set(copied) & set(plan.copy_src.tolist()), "a block is source and destination"
        stored = list(zip(plan.store_tier.tolist(), plan.store_dst.tolist(), strict=True))
        for written in (stored, plan.load_dst.tolist()):
            assert len(set(written)) == len(written), "two copies into one place"
        self.standing[plan.leave] = 0
        for row in plan.enter:
            assert row.num_computed_tokens < len(row.token_ids)
            self.standing[row.slot] = 0
        self.standing[plan.delta_slot] = plan.delta_tokens
        num_tokens = self.standing.sum() + len(plan.draft_slot)
        assert num_tokens <= self.setup.max_num_batched_tokens
        transfers = self.scheduler.state.kv.transfers
        assert num_tokens or transfers.are_under_way, "a step for nothing"
        assert self.standing[plan.draft_slot].all(), "drafts for a row that does not compute"
        self._check_prefill_limits()
        self._check_states(plan)
        for fork in plan.forks:
            self.standing[fork.dst] = self.standing[fork.src]
        assert int(self.scheduler.state.table.live.sum()) <= self.setup.max_num_seqs

    def _check_states(self, plan: StepPlan) -> None:
        for row in plan.enter:
            starts_from_one = self.setup.has_state and row.num_computed_tokens > 0
            assert (row.checkpoint is not None) == starts_from_one, "a state of another length"
        saved = plan.save_checkpoint.tolist()
        assert len(set(saved)) == len(saved), "two states in one checkpoint"
        assert self.standing[plan.save_slot].all(), "a row is saved that does not compute"
        if self.setup.has_state:
            drafted = np.unique(plan.draft_slot)
            assert (self.standing[drafted] == 1).all(), "inputs of a chunk would have to be kept"
            most = self.setup.max_num_seqs + FEWEST_DRAFTS
            assert len(drafted) + len(plan.draft_slot) <= most, "more drafts than are kept"
        is_swapped = (plan.store_ticket == NO_TICKET).any()
        assert not is_swapped or self.setup.has_state == bool(len(plan.stash_slot))
        assert np.isin(plan.stash_slot, plan.leave).all(), "the state of a row that stays"
        stashed = plan.stash_checkpoint.tolist()
        assert len(set(stashed)) == len(stashed), "two states in one checkpoint"

    def _check_prefill_limits(self) -> None:
        limits, table = self.setup.prefill_limits, self.scheduler.state.table
        assert self.standing.max() <= limits.long_prefill_token_threshold
        is_whole = ~np.isin(table.handle, list(self.in_pieces))  # others grow when they have begun
        is_whole &= table.account != SPARE_ACCOUNT  # others may sit steps out
        is_partial = table.live & is_whole & (table.num_total - table.num_computed > 1)
        is_long = table.num_total > limits.long_prefill_token_threshold
        if not self.scheduler.stats().preempted_total:
            assert is_partial.sum() <= limits.max_num_partial_prefills
            assert (is_partial & is_long).sum() <= limits.max_long_partial_prefills

    def _take(self, output: EngineOutput) -> None:
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            client = self.clients[handle]
            assert client.finish is None, "a token after the end"
            client.tokens.append(token)
        for finish in output.finished:
            client = self.clients[finish.handle]
            assert client.finish is None, "a sequence ended twice"
            client.finish = finish

    def _uncut(self, asked: Asked) -> tuple[int, ...]:
        return expected_output(self.setup.model, asked)

    def _expected(self, client: Client) -> tuple[tuple[int, ...], bool]:
        """All tokens if nobody interferes, and whether poison ends them too early."""
        whole, poison = self._uncut(client.asked), self.setup.poison
        if poison in client.asked.prompt:
            return client.output, True
        if poison in whole[:-1]:
            return whole[: max(whole.index(poison) + 1, len(client.output))], True
        return whole, False

    def _check_client(self, handle: int, client: Client) -> None:
        tokens, finish = tuple(client.tokens), client.finish
        assert finish is not None, f"sequence {handle} never ended"
        if finish.reason is FinishReason.DEADLINE:
            assert client.deadline_s is not None
            assert not tokens, "a request was dropped although it had begun"
            return
        if client.beams is not None:
            self._check_beams(handle, client, finish)
            return
        whole, is_poisoned = self._expected(client)
        assert whole[: len(tokens)] == tokens, f"{handle}: {tokens} is not a prefix of {whole}"
        if finish.reason is FinishReason.ABORT:
            return
        if finish.reason is FinishReason.ERROR:
            if handle in self.lost or "pin it again" in finish.message:
                return
            siblings = [c for c in self.clients.values() if c.first_handle == client.first_handle]
            assert any(self._expected(sibling)[1] for sibling in siblings), "an innocent failed"
            return
        assert not is_poisoned, f"{handle} should have failed"
        assert tokens == whole
        self._check_end(client.asked, tokens, finish)

    def _check_beams(self, handle: int, client: Client, finish: SequenceFinish) -> None:
        assert not client.tokens, "a beam was given before its search ended"
        assert client.beams is not None
        asked = client.asked
        expected = expected_beams(self.setup.model, asked, client.beams)
        is_poisoned = self.setup.poison in {*asked.prompt, *expected.computed}
        if finish.reason in (FinishReason.ABORT, FinishReason.ERROR):
            is_innocent = finish.reason is FinishReason.ERROR and handle not in self.lost
            assert is_poisoned or not is_innocent, "an innocent failed"
            assert finish.whole is None
            return
        assert not is_poisoned, f"{handle} should have failed"
        assert finish.whole is not None
        found = expected.found[asked.sample_index]
        tokens = tuple(finish.whole.token_ids.tolist())
        assert (tokens, finish.whole.cum_logprob) == (found.tokens, found.cum_logprob)
        self._check_end(asked, tokens, finish)

    def _check_end(self, asked: Asked, tokens: tuple[int, ...], finish: SequenceFinish) -> None:
        is_stop = asked.may_stop_at(tokens[-1], len(tokens))
        repeats = len(tokens) < asked.max_tokens and asked.repeats_at(tokens)
        reason = FinishReason.REPETITION if repeats else FinishReason.LENGTH
        assert finish.reason is (FinishReason.STOP if is_stop else reason)
        assert finish.stop_token_id == (tokens[-1] if is_stop else None)
