"""Sampling parameters of the live rows, by slot."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.compute.sampling.edits import RowEdits, draw_filters, edits_of
from quire.protocol.sampling_params import SamplingParams, check_vocabulary

__all__ = ["NO_LOGPROBS", "SamplingState"]

NO_LOGPROBS = -2
_HOTTEST = 1e30
"""Any temperature above gives the same law in float64; this one's inverse is a float32."""


class SamplingState:
    """Persistent columns, one entry per slot; what few rows use is kept apart, by slot.

    Columns, all [num_slots]: occupied, greedy, edited (has `edits`) bool; temperature, top_p, min_p
    float64; top_k int64, 0 is off; seed uint64; sample_index int64; num_logprobs int64, NO_LOGPROBS
    if not asked, -1 for all; num_candidates int64, 0 for rows that draw; masked (draws under masks
    that come late) bool. A slot that is left has the values that it was born with.

    version: another number whenever a column may have changed. logprobs_mode: the
    engine's setting.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self.has_processed_logprobs = logprobs_mode.startswith("processed")
        self.occupied = np.zeros(num_slots, np.bool_)
        self.greedy = np.zeros(num_slots, np.bool_)
        self.edited = np.zeros(num_slots, np.bool_)
        self.temperature = np.ones(num_slots, np.float64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.sample_index = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int64)
        self.num_candidates = np.zeros(num_slots, np.int64)
        self.masked = np.zeros(num_slots, np.bool_)
        self.edits: dict[int, RowEdits] = {}
        self.version = 0

    def enter(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        sample_index: int,
        stop_token_ids: Collection[int] = (),
        num_candidates: int = 0,
        *,
        is_masked: bool = False,
    ) -> None:
        """Let a row take `slot`.

        seed: any integer; its lower 64 bits count.
        stop_token_ids: tokens that end the sequence beside `params.stop_token_ids`; banned while
            the output is shorter than `params.min_tokens`.
        num_candidates: number of most likely tokens that the row gives in place of drawing one.
        is_masked: each token is drawn, or given, under a mask.
        Raises RequestError if a token id is outside the vocabulary, EngineError if the slot is
        taken; then nothing has changed.
        """
        if self.occupied[slot]:
            raise EngineError(f"slot {slot} is taken. A row must leave before another enters.")
        check_vocabulary(params, self.vocab_size)
        stops = [token_id for token_id in stop_token_ids if 0 <= token_id < self.vocab_size]
        edits = edits_of(params, stops)
        if edits is not None:
            self.edits[slot] = edits
        self.version += 1
        self.occupied[slot] = True
        self.edited[slot] = edits is not None
        self.greedy[slot] = params.is_greedy
        self.temperature[slot] = min(params.temperature, _HOTTEST)
        top_k, self.top_p[slot], self.min_p[slot] = draw_filters(params)
        self.top_k[slot] = top_k if top_k < self.vocab_size else 0
        self.seed[slot] = seed & 0xFFFFFFFFFFFFFFFF
        self.sample_index[slot] = sample_index
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_candidates[slot] = num_candidates
        self.masked[slot] = is_masked

    def fork(self, src: int, dst: int, sample_index: int) -> None:
        """`dst` becomes a copy of `src` with its own random stream.

        Raises EngineError if `src` is empty or `dst` is taken.
        """
        if not self.occupied[src] or self.occupied[dst]:
            wrong = f"{dst} is taken" if self.occupied[dst] else f"{src} is empty"
            raise EngineError(
                f"cannot fork slot {src} to slot {dst}: {wrong}. Fork to a free slot."
            )
        self.version += 1
        for column in self._columns():
            column[dst] = column[src]
        self.sample_index[dst] = sample_index
        if src in self.edits:
            self.edits[dst] = self.edits[src]

    def leave(self, slot: int) -> None:
        """The row of `slot` is gone, and nothing of it stays behind. An empty slot stays empty."""
        self.version += 1
        for column, empty in zip(self._columns(), _EMPTY, strict=True):
            column[slot] = empty
        self.edits.pop(slot, None)

    def is_plain(
        self,
        slots: npt.NDArray[np.integer[Any]],
        *,
        may_be_masked: bool = False,
        may_be_read: bool = False,
    ) -> bool:
        """Return whether these rows only draw: no edits of logits, no candidates, no masks unless
        these may be, and no log-probabilities unless raw ones may be read."""
        plain = ~self.edited[slots] & (self.num_candidates[slots] == 0)
        if not may_be_read or self.logprobs_mode != "raw_logprobs":
            plain &= self.num_logprobs[slots] == NO_LOGPROBS
        return bool(plain.all()) and (may_be_masked or not self.masked[slots].any())

    def asking(self, slots: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the indices of the rows that want log-probabilities."""
        return np.flatnonzero(self.num_logprobs[slots] != NO_LOGPROBS)

    def draw_parameters(
        self, slots: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.generic], ...]:
        """Return the inputs of `ops.sampling.draw` for rows `slots` [R]: temperature, top_k, top_p,
        min_p, seeds and sample indices, [R] each; temperature 0 in greedy rows."""
        return (
            np.where(self.greedy[slots], 0.0, self.temperature[slots]),
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
            self.seed[slots].view(np.int64),
            self.sample_index[slots],
        )

    def _columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        return (
            self.occupied,
            self.greedy,
            self.edited,
            self.temperature,
            self.top_p,
            self.min_p,
            self.top_k,
            self.seed,
            self.sample_index,
            self.num_logprobs,
            self.num_candidates,
            self.masked,
        )


_EMPTY = (False, False, False, 1.0, 1.0, 0.0, 0, 0, 0, NO_LOGPROBS, 0, False)
"""Values of `_columns` in a free slot, in their order."""
