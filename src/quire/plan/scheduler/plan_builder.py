"""Collects what a plan changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.plan.kv_cache import KVManager, TableUpdates
from quire.plan.scheduler.drafts import NO_DRAFTS, ChosenDrafts
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.step import EMPTY_INTS, EnterRow, ExtendPrompt, ForkRow, IntArray, StepPlan

__all__ = ["PlanBuilder"]


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32) if values else EMPTY_INTS


class PlanBuilder:
    """Collects the differences between the state of the data side and the wanted one."""

    def __init__(self, table: SequenceTable, kv: KVManager) -> None:
        self._table = table
        self._kv = kv
        self._next_step_id = 0
        self._leave: list[int] = []
        self._enter: list[tuple[Sequence, int, int | None]] = []
        self._extend: list[ExtendPrompt] = []
        self._forks: list[ForkRow] = []
        self._start_forks: list[tuple[int, int]] = []
        self._rewinds: dict[int, int] = {}  # number of tokens, by slot
        self._chosen: dict[int, list[int]] = {}  # tokens, by slot

    def leave(self, slot: int) -> None:
        """Let the sequence in `slot` leave; changes that were noted for it are dropped."""
        self._leave.append(slot)
        self._enter = [entry for entry in self._enter if entry[0].slot not in (slot, -1)]
        self._start_forks = [fork for fork in self._start_forks if slot not in fork]
        self._rewinds.pop(slot, None)
        self._chosen.pop(slot, None)
        self._extend = [piece for piece in self._extend if piece.slot != slot]

    def leave_all(self) -> None:
        """Empty every slot: the steps that were to tell of leaving rows are lost."""
        self._leave = list(range(len(self._table.standing)))
        self._forks, self._start_forks, self._rewinds, self._chosen = [], [], {}, {}

    def enter(self, sequence: Sequence, num_computed: int, checkpoint: int | None = None) -> None:
        """`num_computed` tokens of the sequence come from the prefix cache or the host, and its
        recurrent state from a checkpoint."""
        self._enter.append((sequence, num_computed, checkpoint))

    def extend(self, slot: int, token_ids: IntArray) -> None:
        """The prompt of a row goes on; one that is about to enter has the tokens already."""
        if not self.is_entering(slot):
            self._extend.append(ExtendPrompt(slot, token_ids))

    def is_entering(self, slot: int) -> bool:
        """Return whether a row enters with the next plan, with the tokens that it has then."""
        return any(entry[0].slot == slot for entry in self._enter)

    def fork(self, src: int, dst: int, sample_index: int) -> None:
        self._forks.append(ForkRow(src, dst, sample_index))

    def start_fork(self, src: int, dst: int) -> None:
        """Row `dst` is a copy of `src` as it is before this step's tokens are appended."""
        self._start_forks.append((src, dst))

    def append(self, slots: npt.NDArray[np.int64], tokens: IntArray) -> None:
        """Tokens [N] that the plan side has chosen for rows [N]."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            self._chosen[slot] = [token]

    def replace_tail(self, slot: int, num_tokens: int, token_ids: list[int]) -> None:
        """Replace the last `num_tokens` tokens of a row by `token_ids`. The last tokens may include
        some that the next plan was to bring."""
        coming = self._chosen.get(slot, [])
        num_own = min(num_tokens, len(coming))
        if num_tokens > num_own:
            self._rewinds[slot] = self._rewinds.get(slot, 0) + num_tokens - num_own
        tokens = [*coming[: len(coming) - num_own], *token_ids]
        if tokens or coming:
            self._chosen[slot] = tokens

    def build(
        self,
        slots: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        drafts: ChosenDrafts = NO_DRAFTS,
    ) -> StepPlan:
        """The plan in which `slots` compute `tokens` each, beside these drafts, and all other rows
        none."""
        table = self._table
        wanted = np.zeros(len(table.standing), np.int64)
        wanted[slots] = tokens
        changed = (wanted != table.standing).nonzero()[0]
        for fork in self._forks:  # its row begins as a copy, with the delta of its source
            wanted[fork.dst] = wanted[fork.src]
        table.standing = wanted
        updates = self._updates_of_rows_that_stay()
        plan = StepPlan(
            step_id=self._next_step_id,
            stash_slot=_ints(updates.stash_slot),
            stash_checkpoint=_ints(updates.stash_checkpoint),
            leave=_ints(self._leave),
            store_src=_ints(updates.store_src),
            store_tier=_ints(updates.store_tier),
            store_dst=_ints(updates.store_dst),
            store_ticket=_ints(updates.store_ticket),
            copy_src=_ints(updates.copy_src),
            copy_dst=_ints(updates.copy_dst),
            load_tier=_ints(updates.load_tier),
            load_src=_ints(updates.load_src),
            load_dst=_ints(updates.load_dst),
            load_ticket=_ints(updates.load_ticket),
            enter=tuple(self._enter_row(*entry) for entry in self._enter),
            extend=tuple(self._extend),
            rewind_slot=_ints(list(self._rewinds)),
            rewind_tokens=_ints(list(self._rewinds.values())),
            start_fork_src=_ints([src for src, _ in self._start_forks]),
            start_fork_dst=_ints([dst for _, dst in self._start_forks]),
            append_slot=_ints([slot for slot, tokens in self._chosen.items() for _ in tokens]),
            append_token=_ints([token for tokens in self._chosen.values() for token in tokens]),
            table_group=_ints(updates.group),
            table_slot=_ints(updates.slot),
            table_index=_ints(updates.index),
            table_block=_ints(updates.block),
            delta_slot=changed.astype(np.int32),
            delta_tokens=wanted[changed].astype(np.int32),
            draft_slot=np.repeat(drafts.slots, drafts.counts).astype(np.int32)
            if len(drafts.slots)
            else EMPTY_INTS,
            draft_token=drafts.token_ids,
            forks=tuple(self._forks),
            save_slot=_ints(updates.save_slot),
            save_checkpoint=_ints(updates.save_checkpoint),
            save_drafts=_ints(updates.save_drafts),
        )
        self._next_step_id += 1
        self._leave, self._enter, self._extend, self._forks = [], [], [], []
        self._start_forks, self._rewinds, self._chosen = [], {}, {}
        return plan

    def _updates_of_rows_that_stay(self) -> TableUpdates:
        """A row that enters brings its whole tables along."""
        if self._enter:
            self._kv.forget_updates({entry[0].slot for entry in self._enter})
        return self._kv.drain()

    def _enter_row(self, sequence: Sequence, num_computed: int, checkpoint: int | None) -> EnterRow:
        request, beams = sequence.group.request, sequence.group.beams
        return EnterRow(
            slot=sequence.slot,
            token_ids=self._table.known_tokens(sequence.slot).copy(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=num_computed,
            block_tables=self._kv.tables(sequence.slot),
            params=request.params,
            seed=request.seed,
            sample_index=sequence.sample_index,
            stop_token_ids=request.stop_token_ids,
            num_candidates=0 if beams is None else beams.num_candidates,
            checkpoint=checkpoint,
            media=tuple(each.span for each in request.media),
            waits_for_masks=sequence.group.grammar is not None,
            adapter=sequence.group.adapter,
            pooling=request.pooling,
            second_start=request.second_start,
        )
