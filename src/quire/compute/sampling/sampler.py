"""Draws tokens from logits: one token per row, whatever the other rows are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError, QuireError, RequestError
from quire.compute.sampling.edits import RowEdits, RowPlace, edit_row
from quire.compute.sampling.logprobs import (
    NOT_FINITE_ADVICE,
    ReadLogprobs,
    left_by_filters,
    log_mass,
    token_logprobs,
)
from quire.compute.sampling.state import NO_LOGPROBS, SamplingState
from quire.ops.sampling.draw.ranking import IdArray, LogitArray
from quire.protocol.step import IntArray, MaskArray, RowFailure, TokenLogprobs

__all__ = [
    "BANNED",
    "NO_TOKEN",
    "Draw",
    "RowsOfMasks",
    "SampleOutput",
    "Sampler",
    "TokenHistory",
    "check_finite",
    "failures_of",
    "mask_arguments",
    "not_finite",
]

NO_TOKEN = -1

NO_TOKENS = np.zeros(0, np.int32)

BANNED = -2
"""Token of a draw where the request's own edits and mask leave none."""

Draw = Callable[..., torch.Tensor]

RowsOfMasks = tuple[MaskArray, IdArray]
"""Masks of allowed tokens [M, ceil(V / 32)], and of each row the index of its own, -1 for none."""

_BANNED = (
    "every token is banned by the request's own logit_bias, allowed_token_ids, bad_words, "
    "min_tokens, logits processors or grammar taken together. Relax them."
)


def mask_arguments(
    masks: RowsOfMasks, upload: Callable[[npt.NDArray[Any]], torch.Tensor] = torch.from_numpy
) -> dict[str, torch.Tensor]:
    """Return the arguments of the operation `draw` for these masks: none if no row has one, since
    the operation takes at least one mask."""
    words, index = masks
    if not (index >= 0).any():
        return {}
    words = np.ascontiguousarray(words).view(np.int32)
    return {"masks": upload(words), "mask_rows": upload(index)}


class TokenHistory(Protocol):
    """The tokens of the live rows; the runner's rows own them. Read only for rows with edits."""

    def prompt_ids(self, slot: int) -> IntArray:
        """int32 [number of prompt tokens]."""
        ...

    def output_ids(self, slot: int) -> IntArray:
        """int32 [number of output tokens so far]."""
        ...


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Result of a draw.

    token_ids: int32 [N]; NO_TOKEN (-1) in rows that failed, which must not be read on.
    logprobs: log-probabilities of rows that asked, by slot. failed: a sentence for each row that
    has no token.
    """

    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    failed: tuple[RowFailure, ...] = ()


def check_finite(largest: float, position: int) -> None:
    """EngineError unless the largest logit for an absolute position is a finite number."""
    if not math.isfinite(largest):
        raise EngineError(not_finite(position, f" ({largest})"))


def not_finite(position: int, what: str = "") -> str:
    """Return the message for a row whose logits for an absolute position are not finite."""
    return f"the model's logits for position {position} are not finite{what}. {NOT_FINITE_ADVICE}"


def failures_of(
    token_ids: IntArray,
    slots: npt.NDArray[np.integer[Any]],
    positions: npt.NDArray[np.integer[Any]],
) -> tuple[RowFailure, ...]:
    """A sentence for each of the rows [N] that a kernel drew no token for: NO_TOKEN (-1)."""
    return tuple(
        RowFailure(int(slots[index]), not_finite(int(positions[index])))
        for index in np.flatnonzero(token_ids == NO_TOKEN).tolist()
    )


class Sampler:
    """Draws the next token of each row.

    Order: logits processors → bias and bans → penalties → grammar mask → temperature → top-k,
    top-p, min-p → argmax(logit + Gumbel noise). Noise depends on (seed, sample index, position,
    token id) only, and no sum runs over more than one row, so a row's token is the same bits in any
    batch. Greedy rows take the largest logit; of equal ones the smallest token id.

    Works on the host: logits on another device are copied over.
    """

    def __init__(self, state: SamplingState, draw: Draw, read_logprobs: ReadLogprobs) -> None:
        """draw, read_logprobs: the operations `draw` and `token_logprobs`."""
        self.read_logprobs = read_logprobs
        self._state = state
        self._draw_tokens = draw

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | npt.NDArray[np.integer[Any]],
        positions: Sequence[int] | npt.NDArray[np.integer[Any]],
        history: TokenHistory,
        masks: RowsOfMasks | None = None,
        rows: IdArray | None = None,
    ) -> SampleOutput:
        """Draw one token per row.

        logits: [L, V], left as they are. slots: [N]; rows forked from one another may share a row
            of logits. positions: [N], absolute position of the drawn token.
        masks: masks of grammars, and the index of each row's mask. rows: int64 [N], row of logits
            that each draws from; None: its own, in order.
        A row that cannot be sampled is in `failed`; the others are not affected.
        """
        logits = logits.detach().to("cpu", torch.float32).contiguous()
        count = len(slots)
        batch = _Batch(
            np.asarray(slots, np.int64),
            np.asarray(positions, np.int64),
            np.arange(count) if rows is None else rows,
            masks,
            np.full(count, NO_TOKEN, np.int32),
        )
        is_edited = self._state.edited[batch.slots]
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            self._draw(logits, batch, np.flatnonzero(~is_edited), batch.rows[~is_edited])
            if is_edited.any():
                self._draw_edited(logits, batch, np.flatnonzero(is_edited), history)
        logprobs = self._read_logprobs(logits, batch)
        failed = tuple(batch.failed[index] for index in sorted(batch.failed))
        return SampleOutput(batch.token_ids, logprobs, failed)

    def _draw(self, logits: torch.Tensor, batch: _Batch, which: IdArray, rows: IdArray) -> None:
        """Draw for `which` of the batch [M], from `rows` [M] of `logits`."""
        if not which.size:
            return
        positions = batch.positions[which]
        parameters = self._state.draw_parameters(batch.slots[which])
        columns = map(torch.from_numpy, (rows, *parameters, positions))
        token_ids = self._draw_tokens(logits, *columns, **batch.masks_of(which)).numpy()
        batch.token_ids[which] = token_ids
        for place in np.flatnonzero(token_ids < 0).tolist():
            banned, broken = RequestError(_BANNED), EngineError(not_finite(int(positions[place])))
            batch.fail(int(which[place]), banned if token_ids[place] == BANNED else broken)

    def _draw_edited(
        self, logits: torch.Tensor, batch: _Batch, which: IdArray, history: TokenHistory
    ) -> None:
        """Draw for `which` of the batch, from copies that their requests have edited."""
        edited: list[LogitArray] = []
        kept: list[int] = []
        for index in which.tolist():
            row, slot = logits[batch.rows[index]].numpy(), int(batch.slots[index])
            edits = self._state.edits[slot]
            try:
                check_finite(float(row.max()), int(batch.positions[index]))
                row = edit_row(row, edits, self._place(edits, batch, index, history))
                _check_edited(float(row.max()))
            except QuireError as error:
                batch.fail(index, error)
                continue
            edited.append(row)
            kept.append(index)
            if self._state.has_processed_logprobs:
                batch.edited[index] = row
        if edited:
            copies = torch.from_numpy(np.stack(edited))
            self._draw(copies, batch, np.array(kept), np.arange(len(kept)))

    def _place(self, edits: RowEdits, batch: _Batch, index: int, history: TokenHistory) -> RowPlace:
        """Return the place of one row, with its mask where the draw alone does not do: it applies
        the mask itself."""
        slot = int(batch.slots[index])
        return RowPlace(
            history.prompt_ids(slot),
            history.output_ids(slot),
            batch.mask_of(index) if edits.needs_host else None,
            int(self._state.seed[slot]),
            int(self._state.sample_index[slot]),
            int(batch.positions[index]),
        )

    def _read_logprobs(self, logits: torch.Tensor, batch: _Batch) -> dict[int, TokenLogprobs]:
        """Return log-probabilities by slot, of the kind that the engine gives."""
        counts = self._state.num_logprobs[batch.slots]
        which = np.flatnonzero((counts != NO_LOGPROBS) & (batch.token_ids != NO_TOKEN))
        if not len(which):
            return {}
        if self._state.has_processed_logprobs:
            entries = [self._read_processed(logits, batch, index) for index in which.tolist()]
        else:
            entries = token_logprobs(
                self.read_logprobs,
                logits,
                batch.rows[which],
                batch.token_ids[which],
                counts[which],
                self._state.logprobs_mode,
            )
        return dict(zip(batch.slots[which].tolist(), entries, strict=True))

    def _read_processed(self, logits: torch.Tensor, batch: _Batch, index: int) -> TokenLogprobs:
        row, mass = self._processed(logits[batch.rows[index]].numpy(), batch, index)
        (entry,) = token_logprobs(
            self.read_logprobs,
            torch.from_numpy(row[None]),
            np.zeros(1, np.int64),
            batch.token_ids[index : index + 1],
            self._state.num_logprobs[batch.slots[index : index + 1]],
            self._state.logprobs_mode,
        )
        return msgspec.structs.replace(entry, log_mass=mass)

    def _processed(self, row: LogitArray, batch: _Batch, index: int) -> tuple[LogitArray, float]:
        """Return the logits [V] of the law from which a row's token was drawn, and the `log_mass`
        of what its filters left in."""
        place = RowPlace(NO_TOKENS, NO_TOKENS, batch.mask_of(index))
        row = edit_row(batch.edited.get(index, row), None, place)
        slot = batch.slots[index : index + 1]
        filters = [column.item() for column in self._state.draw_parameters(slot)[:4]]
        left = left_by_filters(row, *filters)
        return left, log_mass(row, left, filters[0])


def _check_edited(largest: float) -> None:
    """RequestError if nothing can be drawn from a row that a request has edited so."""
    if largest == -math.inf:
        raise RequestError(_BANNED)
    if not math.isfinite(largest):
        raise RequestError(
            f"the request's own logits processors or penalties made a logit {largest}. "
            "Keep logits finite, or -inf for a ban."
        )


@dataclass(slots=True)
class _Batch:
    """The rows of one call on their way to tokens.

    slots, positions: int64 [N]. rows: int64 [N], row of logits that each draws from. masks: see
    `Sampler.sample`. token_ids: int32 [N]. failed: failures by index. edited: logits by index, as
    requests edited them, if log-probabilities are of these.
    """

    slots: IdArray
    positions: IdArray
    rows: IdArray
    masks: RowsOfMasks | None
    token_ids: IntArray
    failed: dict[int, RowFailure] = field(default_factory=dict[int, RowFailure])
    edited: dict[int, LogitArray] = field(default_factory=dict[int, LogitArray])

    def masks_of(self, which: IdArray) -> dict[str, torch.Tensor]:
        """Return the arguments of the operation for these rows."""
        return {} if self.masks is None else mask_arguments((self.masks[0], self.masks[1][which]))

    def mask_of(self, index: int) -> MaskArray | None:
        """Return the mask of one row; None if it has none."""
        if self.masks is None or self.masks[1][index] < 0:
            return None
        return self.masks[0][self.masks[1][index]]

    def fail(self, index: int, error: QuireError) -> None:
        self.token_ids[index] = NO_TOKEN
        self.failed[index] = RowFailure.of(int(self.slots[index]), error)
