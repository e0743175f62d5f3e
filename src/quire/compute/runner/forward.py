"""The forward of a step's rows, call by call; a row at fault fails alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from quire.base.errors import EngineError, EngineLostError
from quire.compute.attention import StepInputs
from quire.compute.layers import TokenColumns
from quire.compute.runner.changes import Upload
from quire.compute.runner.drafting.states import KeptStates
from quire.compute.runner.halves import in_halves
from quire.compute.runner.inputs import ModelInputs
from quire.compute.runner.media import MediaStore
from quire.compute.runner.pooling import PoolPiece, wanted_tokens
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.compute.sampling import ReadLogprobs, prompt_logprobs
from quire.config.memory.plan import PROMPT_LOGPROB_ROWS
from quire.ops.distributed import ALONE, Collectives, together
from quire.protocol.pooling_params import CLASSIFYING
from quire.protocol.step import REPORT_IT, PromptLogprobs, RowFailure, TokenLogprobs

__all__ = ["NOT_FINITE", "AskedPrompts", "Forward", "ForwardPass"]

NOT_FINITE = "the model computed numbers that are not finite: check its dtype and files"


@dataclass(slots=True)
class Forward:
    """Result of a forward. slots: rows that sample [N]. logits: [L, V] in pieces. first_logits:
    [N], the index of each row's first logits: a row has one for its next token, and one for the
    token after each of its drafts. unfinished: slots [U] in the middle of a prompt, with whether
    the hidden state of each is finite, bool [U] on the device. pooled: pieces of rows that pool,
    with their hidden states float32 [N, E] on the device."""

    slots: list[int] = field(default_factory=list[int])
    first_logits: list[int] = field(default_factory=list[int])
    logits: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict[int, PromptLogprobs])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])
    unfinished: list[tuple[Slots, torch.Tensor]] = field(
        default_factory=list[tuple[Slots, torch.Tensor]]
    )
    pooled: list[tuple[PoolPiece, torch.Tensor]] = field(
        default_factory=list[tuple[PoolPiece, torch.Tensor]]
    )

    def extend(self, other: Forward) -> None:
        num_logits = sum(len(piece) for piece in self.logits)
        self.slots += other.slots
        self.first_logits += [num_logits + first for first in other.first_logits]
        self.logits += other.logits
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.failed += other.failed
        self.unfinished += other.unfinished
        self.pooled += other.pooled


@dataclass(frozen=True, slots=True)
class _PromptPiece:
    """Prompt tokens start <= i < end, each of which predicts the next token. first: index in the
    batch of the row's first token. k: number of alternatives that the request asks for."""

    slot: int
    first: int
    start: int
    end: int
    k: int


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """Prompts with log-probabilities. counts: see `PlanChanges.num_prompt_logprobs`. read: the
    operation `token_logprobs`, on the host."""

    counts: Mapping[int, int]
    read: ReadLogprobs


class Computes(Protocol):
    """A model, or what stands for one (`CausalLM`)."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ForwardPass:
    """Computes the rows of a step. An exception does not end the step: the rows are computed again
    in halves until the failing row is alone. Ranks fail together: an exception on one is treated as
    one on all."""

    def __init__(
        self,
        model: Computes,
        rows: RowTable,
        build: Callable[[ScheduledRows], ModelInputs],
        upload: Upload,
        prompts: AskedPrompts,
        media: MediaStore,
        columns: TokenColumns,
        collectives: Collectives = ALONE,
        states: KeptStates | None = None,
        classify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """build: makes the inputs of a batch. media: embeddings that prompts refer to. columns:
        columns that the model's layers read. collectives: connection to the ranks that compute the
        same rows. states: keeps some states of each forward. classify: `Classifies.scores` of a
        model with classes."""
        self._model = model
        self._rows = rows
        self._build = build
        self._upload = upload
        self._prompts = prompts
        self._media = media
        self._collectives = collectives
        self._columns = columns
        self._states = states
        self._classify = classify

    def compute(self, rows: ScheduledRows) -> Forward:
        """Compute rows; on an exception, in halves, so that only the row at fault fails."""
        if not len(rows.slots):
            return Forward()

        def alone(index: int, error: BaseException) -> Forward:
            row = rows.select(slice(index, index + 1))
            if row.num_drafts[0]:  # a guess must not cost the request
                return self.compute(self._rows.without_drafts(row))
            if len(rows.slots) == 1 and self._collectives.size > 1:
                try:  # it may have been a replay, on one rank: none replays any more
                    return compute(slice(0, 1))
                except EngineLostError:
                    raise
                except BaseException as again:  # noqa: BLE001  it is the row's, whatever it is
                    error = again
            message = f"the model could not compute this request ({error}); {REPORT_IT}"
            return Forward(failed=[RowFailure(int(row.slots[0]), message)])

        def compute(part: slice) -> Forward:
            return together(self._collectives, lambda: self._compute(rows.select(part)))

        result = Forward()
        for part in in_halves(slice(0, len(rows.slots)), compute, alone):
            result.extend(part)
        return result

    def _compute(self, rows: ScheduledRows) -> Forward:
        inputs = self._looking_ahead(self._on_axes(self._build(rows), rows), rows)
        asking = self._asking_for_prompt_logprobs(rows)
        places, counts, pools = wanted_tokens(self._rows, rows)
        is_one_each = not pools and not rows.num_drafts.any()
        wanted = inputs.last_token if is_one_each else self._upload(places)
        states = self._states
        gives_all = bool(asking) or (states is not None and states.of_all_tokens)
        step = replace(
            inputs.step,
            wanted_tokens=None if gives_all else wanted,
            given=self._media.gather(self._rows, rows),
        )
        hidden = self._model.forward(inputs.token_ids, inputs.positions, step)
        last = hidden[wanted] if gives_all else hidden
        if states is not None:
            states.keep(rows, inputs, hidden if states.of_all_tokens else last, counts)
        sampled = counts[rows.samples]
        result = Forward(rows.slots[rows.samples].tolist(), (np.cumsum(sampled) - sampled).tolist())
        of_last = wanted if gives_all else None
        if rows.samples.all():
            result.logits.append(self._logits(last, of_last))
        else:
            if len(sampled):
                samples = self._upload(np.flatnonzero(np.repeat(rows.samples, counts)))
                chosen = samples if of_last is None else of_last[samples]
                result.logits.append(self._logits(last[samples], chosen))
            self._note_others(last, rows, counts, pools, result)
        for each in asking:
            found = self._prompt_logprobs_of(hidden, each)
            result.prompt_logprobs[each.slot] = PromptLogprobs(each.start + 1, found)
        return result

    def _logits(self, hidden: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of hidden [N, E]. places: indices of these logits in the result of the
        forward; None if they are all of it."""
        with self._columns.at(places):
            return self._model.logits(hidden)

    def _note_others(
        self,
        last: torch.Tensor,
        rows: ScheduledRows,
        counts: Slots,
        pools: list[PoolPiece],
        result: Forward,
    ) -> None:
        """Rows that do not sample: in the middle of a prompt, or pooling. last: hidden states
        [W, E], `counts` [R] of each row."""
        for piece in pools:
            states = last[piece.first : piece.first + len(piece.positions)]
            if piece.pooling == "classify_mean":
                states = states.float().mean(0, keepdim=True).to(states.dtype)
            if piece.pooling in CLASSIFYING:
                states = self._classes_of(states)
            states = states.float()
            result.pooled.append((piece, states))
        are_others = ~rows.samples & ~np.isin(rows.slots, [piece.slot for piece in pools])
        if not are_others.any():
            return
        others = self._upload(np.flatnonzero(np.repeat(are_others, counts)))
        is_finite = torch.isfinite(last[others]).all(dim=1)
        result.unfinished.append((rows.slots[are_others], is_finite))

    def _classes_of(self, states: torch.Tensor) -> torch.Tensor:
        """Numbers of the classes, [N, C]. EngineError without any: the plan side refuses that."""
        if self._classify is None:
            raise EngineError("a row is to be sorted into classes, and the model has none")
        return self._classify(states)

    def _on_axes(self, inputs: ModelInputs, rows: ScheduledRows) -> ModelInputs:
        """The inputs with positions on three axes, if some rows compute tokens that have such."""
        found = self._rows.positions_on_axes(rows)
        if found is None:
            return inputs
        padding = len(inputs.token_ids) - found.shape[1]
        positions = self._upload(np.pad(found, ((0, 0), (0, padding))))
        return replace(inputs, positions=positions)

    def _looking_ahead(self, inputs: ModelInputs, rows: ScheduledRows) -> ModelInputs:
        """The inputs with the last key that tokens see, if some see keys behind their own."""
        found = self._rows.last_keys(rows)
        if found is None:
            return inputs
        last_key = self._upload(np.pad(found, (0, len(inputs.token_ids) - len(found))))
        groups = tuple(replace(group, last_key=last_key) for group in inputs.step.groups)
        return replace(inputs, step=replace(inputs.step, groups=groups))

    def _asking_for_prompt_logprobs(self, rows: ScheduledRows) -> list[_PromptPiece]:
        """Return the computed pieces of prompts whose tokens' log-probabilities are asked for."""
        if not self._prompts.counts:
            return []
        pieces: list[_PromptPiece] = []
        first = 0
        for i, slot in enumerate(rows.slots.tolist()):
            start, count = int(rows.num_computed[i]), int(rows.num_tokens[i])
            # The tokens after a prompt are the row's outputs or drafts.
            end = min(start + count, int(self._rows.num_prompt[slot]) - 1)
            k = self._prompts.counts.get(slot)
            if k is not None and end > start:
                pieces.append(_PromptPiece(slot, first, start, end, k))
            first += count
        return pieces

    def _prompt_logprobs_of(
        self, hidden: torch.Tensor, piece: _PromptPiece
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of the prompt tokens that the piece predicts. hidden: [T, E]
        of the batch. Logits are computed in parts, which bounds memory."""
        targets = self._rows.token_ids[piece.slot, piece.start + 1 : piece.end + 1]
        before = hidden[piece.first : piece.first + len(targets)]
        entries: list[TokenLogprobs] = []
        for offset in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = slice(offset, offset + PROMPT_LOGPROB_ROWS)
            places = torch.arange(len(targets), device=hidden.device)[part] + piece.first
            logits = self._logits(before[part], places)
            entries += prompt_logprobs(self._prompts.read, logits, targets[part], piece.k)
        return tuple(entries)
