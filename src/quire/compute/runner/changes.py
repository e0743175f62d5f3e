"""Changes of a plan before its rows are computed, the same for every runner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.base.errors import QuireError
from quire.compute.kv_transfer.tiers import Tiers
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.compute.runner.states import RecurrentStates
from quire.compute.sampling import SamplingState
from quire.protocol.step import RowFailure, StepPlan

__all__ = ["CopyBlocks", "PlanChanges", "Upload"]

CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Upload = Callable[[np.ndarray], torch.Tensor]
"""Copies an array to the device that computes, behind all work that it was given before."""


class PlanChanges:
    """Applies differences to the rows, their sampling parameters and the KV pool.

    num_prompt_logprobs: number of log-probabilities per prompt token, by slot; only rows that ask.
    """

    def __init__(
        self,
        rows: RowTable,
        sampling: SamplingState,
        pages: torch.Tensor,
        tiers: Tiers,
        copy_blocks: CopyBlocks,
        upload: Upload,
        *,
        whole_prompts: bool = False,
        states: RecurrentStates | None = None,
    ) -> None:
        """pages: pages of the KV pool. tiers: memory that blocks are copied to and from.
        whole_prompts: each token of a prompt sees all of the prompt, so a row that computes only a
        part of its prompt fails. states: recurrent states of the rows; None if the model has none.
        """
        self._rows = rows
        self._sampling = sampling
        self._pages = pages
        self._tiers = tiers
        self._copy_blocks = copy_blocks
        self._upload = upload
        self._whole_prompts = whole_prompts
        self._states = states
        self.num_prompt_logprobs: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> list[RowFailure]:
        """Take over the difference; rows that cannot be computed fail."""
        if self._states is not None:
            self._states.stash(plan)
        self._move_blocks(plan)
        for slot in plan.leave.tolist():
            self._sampling.leave(slot)
            self.num_prompt_logprobs.pop(slot, None)
        self._rows.apply(plan)
        refused: list[RowFailure] = []
        for row in plan.enter:
            try:
                self._sampling.enter(
                    row.slot,
                    row.params,
                    row.seed,
                    row.sample_index,
                    row.stop_token_ids,
                    row.num_candidates,
                    is_masked=row.waits_for_masks,
                )
            except QuireError as error:
                refused.append(RowFailure.of(row.slot, error))
                self._rows.failed[row.slot] = True
            if row.params.prompt_logprobs is not None:
                self.num_prompt_logprobs[row.slot] = row.params.prompt_logprobs
        for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
            sample_index = int(self._sampling.sample_index[src])
            self._sampling.fork(int(src), int(dst), sample_index)
        if (states := self._states) is not None:
            states.enter(plan.enter)
            for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
                states.fork(int(src), int(dst))
        if self._whole_prompts:
            refused += self._refuse_cut_prompts()
        return refused

    def _refuse_cut_prompts(self) -> list[RowFailure]:
        slots = self._rows.cut_prompts()
        self._rows.failed[slots] = True
        return [
            RowFailure(
                slot,
                "each token of a prompt sees all of it, but the step computes "
                f"{int(self._rows.standing[slot])} tokens of {int(self._rows.num_prompt[slot])} "
                f"after {int(self._rows.num_computed[slot])}: raise max_num_batched_tokens and set "
                "enable_prefix_caching=False",
            )
            for slot in slots.tolist()
        ]

    def commit_states(self, plan: StepPlan, slots: Slots) -> None:
        """Commit the states of these rows, after a step whose last kernel has committed the rest,
        and keep those that the plan asks for."""
        self._rows.commit_states(slots)
        if self._states is not None:
            self._states.save(plan)

    def keep_tokens(self) -> None:
        """Keep the inputs of tokens in this step that a state may have to see again."""
        if self._states is not None:
            self._states.keep()

    def settle_states(self, plan: StepPlan, rows: ScheduledRows) -> None:
        """After the draws of a step: take states back to where the rows are, and keep those that
        the plan asks for. rows: the scheduled ones, as they were before the step."""
        if self._states is not None:
            self._states.settle(plan, rows)

    def fork(self, plan: StepPlan, sampled: dict[int, int]) -> list[RowFailure]:
        """Let rows branch off after the forward. sampled: slots that sample, each with the index of
        its logits; the new rows join them, with their sources' logits, or fail."""
        failed: list[RowFailure] = []
        for fork in plan.forks:
            self._rows.fork(fork.src, fork.dst)
            if self._states is not None:
                self._states.fork(fork.src, fork.dst)
            if fork.src in sampled:
                self._sampling.fork(fork.src, fork.dst, fork.sample_index)
                sampled[fork.dst] = sampled[fork.src]
            else:
                message = "its prompt could not be computed: the first sample's error says why"
                failed.append(RowFailure(fork.dst, message))
        return failed

    def _move_blocks(self, plan: StepPlan) -> None:
        """Copies to tiers, within the device, and from tiers."""
        if len(plan.store_src):
            self._tiers.store(plan)
        if len(plan.copy_src):
            src, dst = plan.copy_src.astype(np.int64), plan.copy_dst.astype(np.int64)
            self._copy_blocks(self._pages, self._upload(src), self._upload(dst))
        if len(plan.load_src):
            self._tiers.load(plan)
