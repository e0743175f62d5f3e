"""Executes one step on one device: plan in, result out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.config.memory_plan import PROMPT_LOGPROB_ROWS
from quire.errors import QuireError
from quire.models import CausalLM
from quire.protocol.step import (
    PromptLogprobs,
    RowFailure,
    StepPlan,
    StepResult,
    TokenCandidates,
    TokenLogprobs,
)
from quire.runner.captured import CapturedSteps
from quire.runner.host_pages import HostPages
from quire.runner.inputs import InputBuilder, ModelInputs
from quire.runner.rows import RowTable, ScheduledRows
from quire.sampling import (
    NO_TOKEN,
    Draw,
    SampleOutput,
    Sampler,
    SamplingState,
    find_candidates,
    prompt_logprobs,
)

__all__ = ["ModelRunner"]

CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(slots=True)
class _Forward:
    """What a forward of some rows gave. slots: rows that sample [N]; logits [N, V]."""

    slots: list[int] = field(default_factory=list[int])
    logits: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict[int, PromptLogprobs])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])

    def extend(self, other: _Forward) -> None:
        self.slots += other.slots
        self.logits += other.logits
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.failed += other.failed


class ModelRunner:
    """Owns the rows; computes with the model and the sampler that it is given.

    An exception while rows are computed does not end the step: the rows are computed again in
    halves until the one at fault is alone. Nothing of a row is committed before it was computed.
    """

    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        inputs: InputBuilder,
        captured: CapturedSteps,
        sampling: SamplingState,
        pages: torch.Tensor,
        host: HostPages,
        copy_blocks: CopyBlocks,
        draw: Draw,
    ) -> None:
        """pages: those of the KV pool. host: where they are swapped to. draw: the operation
        `quire.ops.draw`."""
        self._model = model
        self._rows = rows
        self._inputs = inputs
        self._captured = captured
        self._sampling = sampling
        self._sampler = Sampler(sampling, draw)
        self._pages = pages
        self._host = host
        self._copy_blocks = copy_blocks
        self._prompt_logprobs: dict[int, int] = {}  # how many, by slot

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's difference, compute its rows, sample, and commit."""
        refused = self._apply(plan)
        rows = _in_order_of_writing(self._rows.scheduled(), plan)
        forward = self._forward(rows)
        forward.failed += refused
        self._rows.failed[[failure.slot for failure in forward.failed]] = True
        self._rows.commit_computed(rows)
        sources = self._fork(plan, forward)
        return self._sample(plan.step_id, forward, sources)

    def _apply(self, plan: StepPlan) -> list[RowFailure]:
        """Take over the difference; rows whose parameters the sampler refuses fail."""
        lost_blocks = self._move_blocks(plan)
        for slot in plan.leave.tolist():
            self._sampling.leave(slot)
            self._prompt_logprobs.pop(slot, None)
        self._rows.apply(plan)
        refused = self._fail_rows_of(lost_blocks, plan)
        for row in plan.enter:
            try:
                self._sampling.enter(
                    row.slot,
                    row.params,
                    row.seed,
                    row.sample_index,
                    row.stop_token_ids,
                    row.num_candidates,
                )
            except QuireError as error:
                refused.append(RowFailure(row.slot, str(error)))
                self._rows.failed[row.slot] = True
            if row.params.prompt_logprobs is not None:
                self._prompt_logprobs[row.slot] = row.params.prompt_logprobs
        for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
            sample_index = int(self._sampling.sample_index[src])
            self._sampling.fork(int(src), int(dst), sample_index)
        return refused

    def _move_blocks(self, plan: StepPlan) -> frozenset[int]:
        """Copies between host and device, and within it. Blocks that could not be brought in."""
        self._host.copy_out(plan.swap_out_src, plan.swap_out_dst)
        if len(plan.copy_src):
            src, dst = plan.copy_src.astype(np.int64), plan.copy_dst.astype(np.int64)
            self._copy_blocks(self._pages, torch.from_numpy(src), torch.from_numpy(dst))
        return self._host.copy_in(plan.swap_in_src, plan.swap_in_dst)

    def _fail_rows_of(self, lost_blocks: frozenset[int], plan: StepPlan) -> list[RowFailure]:
        """Rows that enter with blocks whose K/V were lost on the way to the host or back."""
        if not lost_blocks:
            return []
        message = "its K/V were lost on the way to host memory or back: send it again"
        slots = [
            row.slot
            for row in plan.enter
            if any(not lost_blocks.isdisjoint(table.tolist()) for table in row.block_tables)
        ]
        self._rows.failed[slots] = True
        return [RowFailure(slot, message) for slot in slots]

    def _forward(self, rows: ScheduledRows) -> _Forward:
        """Compute rows: decode steps by replaying a captured one, all others call by call."""
        if not len(rows.slots):
            return _Forward()
        try:
            logits = self._captured.logits(rows)
        except Exception:  # noqa: BLE001  whose fault it is, the other way finds out
            logits = None
        if logits is None:
            return self._compute_or_halve(rows)
        return _Forward(slots=rows.slots.tolist(), logits=[logits])

    def _compute_or_halve(self, rows: ScheduledRows) -> _Forward:
        """Compute rows; on an exception, in halves, so that only the row at fault fails."""
        try:
            return self._compute(rows)
        except Exception as error:  # noqa: BLE001  whatever it is, it must end with its row
            if len(rows.slots) == 1:
                slot = int(rows.slots[0])
                message = f"the model could not compute this request ({error}): send it again"
                return _Forward(failed=[RowFailure(slot, message)])
        middle = len(rows.slots) // 2
        result = self._compute_or_halve(_select(rows, slice(0, middle)))
        result.extend(self._compute_or_halve(_select(rows, slice(middle, None))))
        return result

    def _compute(self, rows: ScheduledRows) -> _Forward:
        inputs = self._inputs.build(rows)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.step)
        sampled = np.flatnonzero(rows.samples)
        result = _Forward(slots=rows.slots[sampled].tolist())
        if len(sampled):
            last = inputs.last_token[torch.from_numpy(sampled)]
            result.logits.append(self._model.logits(hidden[last]))
        if len(sampled) < len(rows.slots):
            result.failed += _not_finite(rows, hidden[inputs.last_token])
        if self._prompt_logprobs:
            self._add_prompt_logprobs(rows, inputs, hidden, result)
        return result

    def _add_prompt_logprobs(
        self, rows: ScheduledRows, inputs: ModelInputs, hidden: torch.Tensor, result: _Forward
    ) -> None:
        """For rows that ask: how likely each prompt token was that this chunk predicts."""
        for i, slot in enumerate(rows.slots.tolist()):
            k = self._prompt_logprobs.get(slot)
            start = int(rows.num_computed[i])
            end = min(start + int(rows.num_tokens[i]), int(self._rows.num_prompt[slot]) - 1)
            if k is None or end <= start:
                continue
            first = int(inputs.step.query_start_loc[i])
            targets = self._rows.token_ids[slot, start + 1 : end + 1]
            entries: list[TokenLogprobs] = []
            for offset in range(0, end - start, PROMPT_LOGPROB_ROWS):
                stop = min(offset + PROMPT_LOGPROB_ROWS, end - start)
                logits = self._model.logits(hidden[first + offset : first + stop])
                entries += prompt_logprobs(logits, targets[offset:stop], k)
            result.prompt_logprobs[slot] = PromptLogprobs(start + 1, tuple(entries))

    def _fork(self, plan: StepPlan, forward: _Forward) -> dict[int, int]:
        """Let rows branch off. Slots that sample, each with the index of its logits."""
        sources = {slot: i for i, slot in enumerate(forward.slots)}
        for fork in plan.forks:
            self._rows.fork(fork.src, fork.dst)
            if fork.src in sources:
                self._sampling.fork(fork.src, fork.dst, fork.sample_index)
                sources[fork.dst] = sources[fork.src]
            else:
                message = "the prompt of this sample could not be computed: send it again"
                forward.failed.append(RowFailure(fork.dst, message))
        return sources

    def _sample(self, step_id: int, forward: _Forward, sources: dict[int, int]) -> StepResult:
        slots = np.fromiter(sources, np.int64, len(sources))
        if not len(slots):
            return self._result(step_id, slots, np.zeros(0, np.int32), {}, {}, forward)
        logits = forward.logits[0] if len(forward.logits) == 1 else torch.cat(forward.logits)
        rows = np.fromiter(sources.values(), np.int64, len(sources))
        candidates: dict[int, TokenCandidates] = {}
        draws = self._sampling.num_candidates[slots] == 0
        if not draws.all():
            candidates = self._find_candidates(logits, rows[~draws], slots[~draws], forward)
            rows, slots = rows[draws], slots[draws]
        if not np.array_equal(rows, np.arange(len(logits))):
            logits = logits[torch.from_numpy(rows)]
        output = self._draw(logits, slots)
        if output.failed:
            forward.failed += output.failed
            failed = [failure.slot for failure in output.failed]
            self._rows.failed[failed] = True
        drawn = output.token_ids != NO_TOKEN
        return self._result(
            step_id, slots[drawn], output.token_ids[drawn], candidates, output.logprobs, forward
        )

    def _find_candidates(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        forward: _Forward,
    ) -> dict[int, TokenCandidates]:
        """Of the `rows` of logits whose next token the plan side chooses, by slot."""
        output = find_candidates(logits, rows, slots, self._sampling, self._rows)
        forward.failed += output.failed
        self._rows.failed[[failure.slot for failure in output.failed]] = True
        return output.candidates

    def _draw(self, logits: torch.Tensor, slots: npt.NDArray[np.int64]) -> SampleOutput:
        """Sample rows [N, V]; on an exception, in halves, so that only the row at fault fails."""
        try:
            positions = self._rows.num_tokens[slots]
            return self._sampler.sample(logits, slots, positions, self._rows)
        except Exception as error:  # noqa: BLE001  as in `_forward`
            if len(slots) == 1:
                message = f"the sampler could not draw for this request ({error}): send it again"
                failure = RowFailure(int(slots[0]), message)
                return SampleOutput(np.full(1, NO_TOKEN, np.int32), failed=(failure,))
        middle = len(slots) // 2
        first = self._draw(logits[:middle], slots[:middle])
        second = self._draw(logits[middle:], slots[middle:])
        return SampleOutput(
            np.concatenate((first.token_ids, second.token_ids)),
            {**first.logprobs, **second.logprobs},
            (*first.failed, *second.failed),
        )

    def _result(
        self,
        step_id: int,
        slots: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        candidates: dict[int, TokenCandidates],
        logprobs: dict[int, TokenLogprobs],
        forward: _Forward,
    ) -> StepResult:
        self._rows.append(slots, token_ids)
        return StepResult(
            step_id=step_id,
            slots=slots.astype(np.int32),
            token_ids=token_ids,
            candidates=candidates,
            logprobs=logprobs,
            prompt_logprobs=forward.prompt_logprobs,
            failed=tuple(forward.failed),
        )


def _not_finite(rows: ScheduledRows, last: torch.Tensor) -> list[RowFailure]:
    """Rows in the middle of a prompt whose hidden state [R, E] is broken. What they wrote must not
    be taken for good until they sample, which is where the sampler finds the same of the others."""
    broken = ~torch.isfinite(last).all(dim=1).numpy() & ~rows.samples
    return [
        RowFailure(
            slot, "the model computed numbers that are not finite: check its dtype and files"
        )
        for slot in rows.slots[broken].tolist()
    ]


def _select(rows: ScheduledRows, part: slice | npt.NDArray[np.int64]) -> ScheduledRows:
    return replace(
        rows,
        slots=rows.slots[part],
        num_computed=rows.num_computed[part],
        num_tokens=rows.num_tokens[part],
        samples=rows.samples[part],
    )


def _in_order_of_writing(rows: ScheduledRows, plan: StepPlan) -> ScheduledRows:
    """A row may read blocks that a row which enters before it writes in the same step. In one batch
    that needs no order; computed in halves, writers must come first."""
    if len(plan.enter) < 2:
        return rows
    rank = {row.slot: i for i, row in enumerate(plan.enter)}
    ranks = np.array([rank.get(slot, -1) for slot in rows.slots.tolist()])
    return _select(rows, np.argsort(ranks, kind="stable"))
