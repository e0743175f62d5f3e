"""Shares the tokens of a step: decoding sequences first, then prompts by key."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from quire.config.resolved import ResolvedScheduler
from quire.plan.scheduler.policies.spare import SPARE_ACCOUNT
from quire.plan.scheduler.sequence import SequenceGroup
from quire.plan.scheduler.states.kept import KeptStates
from quire.plan.scheduler.table import SequenceTable

__all__ = ["MAX_STEPS_PAUSED", "PrefillLimits", "StepTokens", "TokenBudget"]

Slots = npt.NDArray[np.int64]

UNLIMITED = 2**62
MAX_STEPS_PAUSED = 16
"""Steps in a row that sequences on spare capacity sit out at most, however many prompts come."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits by which long prompts leave room to others; the names and meanings are those of vLLM.

    long_prefill_token_threshold: tokens that one prompt computes in a step at most; a longer prompt
        is a long one.
    max_num_partial_prefills: prompts that are computed in part, with more to come, at once.
    max_long_partial_prefills: long ones among these. Prompts that are whole in one step pass by
        those that must wait for these limits. A preempted group is exempt, and so is an open prompt
        once it has begun.
    """

    long_prefill_token_threshold: int = UNLIMITED
    max_num_partial_prefills: int = UNLIMITED
    max_long_partial_prefills: int = UNLIMITED

    @classmethod
    def of(cls, settings: ResolvedScheduler) -> PrefillLimits:
        """Make the limits of the settings, where None is no limit."""
        given = {item.name: getattr(settings, item.name) for item in fields(cls)}
        return cls(**{name: UNLIMITED if n is None else n for name, n in given.items()})

    @property
    def bounds_partial(self) -> bool:
        return min(self.max_num_partial_prefills, self.max_long_partial_prefills) < UNLIMITED


class TokenBudget:
    """Tokens of one step, `max_num_batched_tokens` at most.

    is_spare_paused: sequences on spare capacity sit this step out, since it computes a prompt of
    another one, whose first token would come later.
    """

    def __init__(
        self,
        table: SequenceTable,
        settings: ResolvedScheduler,
        states: KeptStates | None = None,
        *,
        whole_prompts: bool = False,
    ) -> None:
        """states: keeper of recurrent states, which shortens chunks; None leaves them as they are.
        whole_prompts: waiting prompts are not cut, and wait for a step that has room for all
        of them."""
        self.whole_prompts = whole_prompts
        self.is_spare_paused = False
        self._num_paused = 0  # steps in a row
        self._table = table
        self._max_tokens = settings.max_num_batched_tokens
        self._states = states
        self.limits = PrefillLimits.of(settings)

    def choose_running(self, *, has_spare: bool) -> tuple[Slots, Slots]:
        """Slots that compute in the next step, and tokens for each, at least one. has_spare: some
        group runs or waits on spare capacity."""
        self.is_spare_paused = False
        todo = self._table.todo()
        slots = todo.nonzero()[0]
        if has_spare:
            slots = self._without_spare(slots)
        todo = todo[slots]
        tokens = self._shortened(slots, np.minimum(todo, self.limits.long_prefill_token_threshold))
        left = self._max_tokens
        if int(tokens.sum()) <= left:
            return slots, tokens
        for part in (todo == 1).nonzero()[0], (todo > 1).nonzero()[0]:
            wanted = int(tokens[part].sum())
            if wanted > left:
                left = self._share_out(left, slots, tokens, part.tolist())
            else:
                left -= wanted
        tokens = self._shortened(slots, tokens)
        return slots[tokens > 0], tokens[tokens > 0]

    def planned(self) -> None:
        """Note that the step that was shared out is computed."""
        self._num_paused = self._num_paused + 1 if self.is_spare_paused else 0

    @property
    def may_pause_spare(self) -> bool:
        """True if sequences on spare capacity may sit out one more step."""
        return self._num_paused < MAX_STEPS_PAUSED

    def pause_spare(self) -> bool:
        """Note that the step computes a prompt that is not on spare capacity. Return whether
        sequences on spare capacity sit it out."""
        self.is_spare_paused = self.may_pause_spare
        return self.is_spare_paused

    def _without_spare(self, slots: Slots) -> Slots:
        """Return the running `slots` that the step is shared out to: all but those on spare
        capacity if one of the others computes its prompt."""
        urgent = slots[self._table.account[slots] != SPARE_ACCOUNT]
        return urgent if self.are_in_prompts(urgent) and self.pause_spare() else slots

    def are_in_prompts(self, slots: Slots) -> bool:
        """Return whether some of these slots have a part of their prompts left to compute."""
        return bool((self._table.num_computed[slots] < self._table.num_prompt[slots]).any())

    def _shortened(self, slots: Slots, tokens: Slots) -> Slots:
        if self._states is None and not self._table.num_with_whole:
            return tokens
        starts = self._table.num_computed[slots]
        ends = starts + tokens
        if self._states is not None:
            ends = self._states.stops_at(slots, ends)
        if self._table.num_with_whole:
            for i in (ends < self._table.whole_end[slots]).nonzero()[0].tolist():
                ends[i] = self._table.at(int(slots[i])).group.stop_of(int(starts[i]), int(ends[i]))
        return ends - starts

    def cut_to(self, slot: int, num_tokens: int) -> int:
        """Return the part of `num_tokens` that a running slot computes if it gets no more."""
        start = int(self._table.num_computed[slot])
        return self._table.at(slot).group.stop_of(start, start + num_tokens) - start

    def first_chunk(self, group: SequenceGroup, num_tokens: int) -> int:
        """Return the part of `num_tokens` that a group of which nothing is computed takes."""
        if self._states is not None:
            num_tokens = self._states.first_stop(group.sequences[0], num_tokens)
        return group.stop_of(0, num_tokens)

    def _share_out(self, left: int, slots: Slots, tokens: Slots, part: list[int]) -> int:
        """Cut the `tokens` at the places in `part` down to `left` in all, by key; what is left."""
        part.sort(key=lambda i: self._table.at(int(slots[i])).group.key)
        for i in part:
            tokens[i] = min(int(tokens[i]), left)
            left -= int(tokens[i])
        return left

    def open(self, slots: Slots, tokens: Slots) -> StepTokens:
        """Return the tokens for waiting groups in a step in which `slots` compute `tokens`."""
        wanted = np.zeros(len(self._table.live), np.int64)
        wanted[slots] = tokens
        left = self._max_tokens - int(tokens.sum())
        prompts = slots[self._table.todo()[slots] > 1].tolist()
        order = sorted((self._table.at(slot).group.key, slot) for slot in prompts)
        spare = slots[self._table.account[slots] == SPARE_ACCOUNT]
        decodes = spare[self._table.todo()[spare] == 1]
        return StepTokens(self, wanted, left, order, spare, decodes)

    def num_partial(self, wanted: Slots, *, is_spare: bool) -> tuple[int, int]:
        """Return the number of prompts that are not finished after a step that computes `wanted` by
        slot, and the number of long ones among them. is_spare: whether prompts on spare capacity
        count too, which may have to sit steps out; else they keep nobody out."""
        todo = self._table.todo()
        left = (todo > 1) & (todo > wanted)
        if not is_spare:
            left &= self._table.account != SPARE_ACCOUNT
        is_long = self._table.num_total > self.limits.long_prefill_token_threshold
        return int(left.sum()), int((left & is_long).sum())


class StepTokens:
    """The tokens of one step while waiting groups are admitted.

    wanted: tokens wanted by each slot. left: tokens that nobody wants yet. prompts: (key, slot) of
    running prompts, by key. spare, spare_decodes: running slots on spare capacity, and those of
    them that decode.
    """

    def __init__(
        self,
        budget: TokenBudget,
        wanted: Slots,
        left: int,
        prompts: list[tuple[tuple[float, int], int]],
        spare: Slots,
        spare_decodes: Slots,
    ) -> None:
        self._budget = budget
        self._spare, self._spare_decodes = spare, spare_decodes
        self._wanted = wanted
        self._left = left
        self._prompts = prompts
        # These are of `wanted`, once it was asked for, by whether spare ones count.
        self._partial: dict[bool, tuple[int, int]] = {}

    def offered_to(self, group: SequenceGroup) -> int:
        """Tokens that the group may compute: the rest of the budget, tokens of sequences that it
        pauses, and those of running prompts after it; none if prompts are not cut and this one is
        longer."""
        offered = self._left + self._freed_by(group)
        for key, slot in reversed(self._prompts):
            if key < group.key:
                break
            offered += int(self._wanted[slot])
        if self._budget.whole_prompts and offered < len(group.sequences[0].token_ids):
            return 0
        return min(offered, self._budget.limits.long_prefill_token_threshold)

    def _freed_by(self, group: SequenceGroup) -> int:
        """Return the tokens of decoding sequences on spare capacity that pause if the group comes:
        it begins with its prompt. Prompts on spare capacity are among `prompts`."""
        (first, *_), num_prompt = group.sequences, len(group.request.prompt_token_ids)
        begins = first.swapped is None and len(first.token_ids) <= num_prompt
        if group.is_spare or not begins or not self._budget.may_pause_spare:
            return 0
        return int(self._wanted[self._spare_decodes].sum())

    def may_start(self, group: SequenceGroup) -> bool:
        """Return whether the limits on partly computed prompts let the group begin. The cached part
        of its prompt is not known yet and counts as left to compute."""
        limits = self._budget.limits
        if not limits.bounds_partial or group.was_admitted:
            return True
        num_tokens = len(group.sequences[0].token_ids)
        given = self._budget.first_chunk(group, min(num_tokens, self.offered_to(group)))
        is_partial = given < num_tokens
        is_long = is_partial and num_tokens > limits.long_prefill_token_threshold
        is_spare = group.is_spare
        if is_spare not in self._partial:
            self._partial[is_spare] = self._budget.num_partial(self._wanted, is_spare=is_spare)
        partial, long = self._partial[is_spare]
        if is_partial and partial >= limits.max_num_partial_prefills:
            return False  # what it would take from running prompts leaves more of them partial
        partial_then, long_then = partial, long
        room = self._left + self._freed_by(group)
        if given > room:
            wanted = self._without(given - room)
            partial_then, long_then = self._budget.num_partial(wanted, is_spare=is_spare)
        return partial_then + is_partial <= max(limits.max_num_partial_prefills, partial) and (
            long_then + is_long <= max(limits.max_long_partial_prefills, long)
        )

    def admit(self, chunks: list[tuple[int, int]], *, is_spare: bool) -> None:
        """Note that a group has entered: (slot, tokens) of each sequence. Tokens that running
        prompts had been given and this group takes are taken from them; blocks that they got
        meanwhile stay theirs. is_spare: whether the group is on spare capacity; another group
        pauses running ones that are."""
        slots = np.array([slot for slot, _ in chunks], np.int64)
        if not is_spare and self._budget.are_in_prompts(slots) and self._budget.pause_spare():
            self._left += int(self._wanted[self._spare].sum())
            self._wanted[self._spare] = 0
        self._partial.clear()
        count = sum(tokens for _, tokens in chunks)
        self._wanted = self._without(count - self._left)
        self._left = max(self._left - count, 0)
        for slot, tokens in chunks:
            self._wanted[slot] = tokens

    def _without(self, count: int) -> Slots:
        """Return the wanted tokens by slot when `count` tokens are taken from the last running
        prompts."""
        wanted = self._wanted
        if count > 0:
            wanted = wanted.copy()
        for _, slot in reversed(self._prompts):
            if count <= 0:
                break
            left = self._budget.cut_to(slot, max(int(wanted[slot]) - count, 0))
            count -= int(wanted[slot]) - left
            wanted[slot] = left
        return wanted

    def chosen(self) -> tuple[Slots, Slots]:
        """Slots that compute, and tokens for each, at least one."""
        slots = self._wanted.nonzero()[0]
        return slots, self._wanted[slots]
