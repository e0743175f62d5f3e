"""Draws tokens from logits: one token per row, whatever the other rows are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import EngineError, QuireError, RequestError
from quire.ops.sampling.draw.ranking import IdArray, LogitArray
from quire.protocol.step import IntArray, MaskArray, RowFailure, TokenLogprobs
from quire.sampling.edits import edit_row
from quire.sampling.logprobs import NOT_FINITE_ADVICE, token_logprobs
from quire.sampling.state import NO_LOGPROBS, SamplingState

__all__ = [
    "BANNED",
    "NO_TOKEN",
    "Draw",
    "SampleOutput",
    "Sampler",
    "TokenHistory",
    "check_finite",
    "failures_of",
    "not_finite",
]

NO_TOKEN = -1

BANNED = -2
"""Token of a row on a device whose request bans all tokens."""

Draw = Callable[..., torch.Tensor]


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
    logprobs: by slot, for rows that asked. failed: a sentence for each row that has no token.
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

    def __init__(self, state: SamplingState, draw: Draw) -> None:
        """draw: the operation `quire.ops.sampling.draw`."""
        self._state = state
        self._draw_tokens = draw

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | npt.NDArray[np.integer[Any]],
        positions: Sequence[int] | npt.NDArray[np.integer[Any]],
        history: TokenHistory,
        masks: Mapping[int, MaskArray] | None = None,
    ) -> SampleOutput:
        """Draw one token per row.

        logits: [N, V], left as they are. slots: [N]; rows forked from one another may share a row
            of logits by naming it twice. positions: [N], absolute position of the drawn token.
        masks: by slot, grammar masks [ceil(V / 32)].
        A row that cannot be sampled is in `failed`; the others are not affected.
        """
        logits = logits.detach().to("cpu", torch.float32).contiguous()
        rows: npt.NDArray[np.float32] = logits.numpy()
        slot_array = np.asarray(slots, np.int64)
        greedy = rows.argmax(axis=1) if len(rows) else np.zeros(0, np.int64)
        largest = rows[np.arange(len(rows)), greedy]
        if not masks and self._state.simple[slot_array].all() and np.isfinite(largest).all():
            return SampleOutput(greedy.astype(np.int32))

        batch = _Batch(greedy, largest, slot_array, np.asarray(positions, np.int64))
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            self._fail_broken_rows(batch)
            self._edit(rows, batch, history, masks or {})
            self._draw(logits, batch)
            logprobs = self._read_logprobs(rows, batch)
        return SampleOutput(batch.token_ids.astype(np.int32), logprobs, tuple(batch.failed))

    def _fail_broken_rows(self, batch: _Batch) -> None:
        for index in np.flatnonzero(~np.isfinite(batch.largest)).tolist():
            try:
                check_finite(float(batch.largest[index]), int(batch.positions[index]))
            except EngineError as error:
                batch.fail(index, error)

    def _edit(
        self,
        rows: npt.NDArray[np.float32],
        batch: _Batch,
        history: TokenHistory,
        masks: Mapping[int, MaskArray],
    ) -> None:
        """Replace the rows that their requests change, by edited copies."""
        for index in batch.live().tolist():
            slot = int(batch.slots[index])
            edits, mask = self._state.edits.get(slot), masks.get(slot)
            if edits is None and mask is None:
                continue
            prompt_ids, output_ids = history.prompt_ids(slot), history.output_ids(slot)
            try:
                row = edit_row(rows[index], edits, prompt_ids, output_ids, mask)
                batch.replace(index, row)
            except QuireError as error:
                batch.fail(index, error)

    def _draw(self, logits: torch.Tensor, batch: _Batch) -> None:
        """Fill `batch.token_ids`; those of greedy rows are there from the start."""
        live = batch.live()
        random = live[~self._state.greedy[batch.slots[live]]]
        is_edited = np.array([index in batch.edited for index in random.tolist()], np.bool_)
        plain, edited = random[~is_edited], random[is_edited]
        if plain.size:
            batch.token_ids[plain] = self._draw_rows(logits, plain, plain, batch)
        if edited.size:
            rows = torch.from_numpy(np.stack([batch.edited[index] for index in edited.tolist()]))
            batch.token_ids[edited] = self._draw_rows(rows, np.arange(edited.size), edited, batch)

    def _draw_rows(
        self, logits: torch.Tensor, rows: IdArray, which: IdArray, batch: _Batch
    ) -> IntArray:
        """Draw for `which` of the batch, from `rows` of `logits`."""
        parameters = self._state.draw_parameters(batch.slots[which])
        columns = (rows, *parameters, batch.positions[which])
        return self._draw_tokens(logits, *map(torch.from_numpy, columns)).numpy()

    def _read_logprobs(
        self, rows: npt.NDArray[np.float32], batch: _Batch
    ) -> dict[int, TokenLogprobs]:
        """Return log-probabilities by slot, from the raw logits, not the edited ones."""
        live = batch.live()
        asked = live[self._state.num_logprobs[batch.slots[live]] != NO_LOGPROBS]
        found: dict[int, TokenLogprobs] = {}
        for index in asked.tolist():
            slot = int(batch.slots[index])
            k = int(self._state.num_logprobs[slot])
            found[slot] = token_logprobs(rows[index], int(batch.token_ids[index]), k)
        return found


@dataclass(slots=True)
class _Batch:
    """The rows of one call on their way to tokens.

    token_ids: int64 [N], at first where each row is largest, and `largest` float32 [N] that logit.
    slots, positions: int64 [N]. edited: logits [V] of rows that their requests change, by index.
    """

    token_ids: IdArray
    largest: LogitArray
    slots: IdArray
    positions: IdArray
    edited: dict[int, LogitArray] = field(default_factory=dict[int, LogitArray])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])

    def live(self) -> IdArray:
        return np.flatnonzero(self.token_ids != NO_TOKEN)

    def fail(self, index: int, error: QuireError) -> None:
        self.token_ids[index] = NO_TOKEN
        self.failed.append(RowFailure.of(int(self.slots[index]), error))

    def replace(self, index: int, row: LogitArray) -> None:
        """Put edited logits in place. Raises RequestError if nothing can be drawn from them."""
        best = int(row.argmax())
        largest = float(row[best])
        if largest == -math.inf:
            raise RequestError(
                "every token is banned by the request's own logit_bias, allowed_token_ids, "
                "bad_words, min_tokens, logits processors or grammar taken together. Relax them."
            )
        if not math.isfinite(largest):
            raise RequestError(
                f"the request's own logits processors or penalties made a logit {largest}. "
                "Keep logits finite, or -inf for a ban."
            )
        self.edited[index], self.token_ids[index], self.largest[index] = row, best, largest
