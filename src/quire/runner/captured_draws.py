"""The draws of captured steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.runner.rows import RowTable, Slots
from quire.sampling import Draw, SamplingState

__all__ = ["CapturedDraws"]


class CapturedDraws:
    """For rows that ask no more than a token. Where the draw reads its parameters stays the same:
    whoever captured it has them set (`prepare`) before a replay. One of the same rows, for the
    tokens after, needs nothing: the draw itself leaves their positions."""

    def __init__(
        self,
        sampling: SamplingState,
        rows: RowTable,
        slots: Slots,
        draw: Draw,
        append_tokens: Callable[..., None],
    ) -> None:
        """slots: which rows draw, as of `DecodeInputs`. draw, append_tokens: the operations, on the
        host."""
        self._sampling = sampling
        self._draw = draw
        self._append_tokens = append_tokens
        self._row_columns = [
            torch.from_numpy(column)
            for column in (rows.num_computed, rows.num_tokens, rows.token_ids)
        ]
        self._all_slots = torch.from_numpy(slots)
        self._slots = np.zeros(0, np.int64)
        self._version = -1
        self._is_plain = False
        self._index = torch.arange(len(slots))
        self._positions = np.zeros(len(slots), np.int64)
        of_none = sampling.draw_parameters(self._slots)
        self._parameters = [np.zeros(len(slots), column.dtype) for column in of_none]

    def prepare(self, slots: Slots, positions: Slots) -> bool:
        """Row i of the next draw is that of slots[i], for its token at positions[i]. False if some
        of these rows ask for more than a draw."""
        self._positions[: len(slots)] = positions
        sampling = self._sampling
        if self._version != sampling.version or not np.array_equal(slots, self._slots):
            columns = sampling.draw_parameters(slots)
            for kept, column in zip(self._parameters, columns, strict=True):
                kept[: len(slots)] = column
            self._is_plain = sampling.is_plain(slots)
            self._slots, self._version = slots, sampling.version
        return self._is_plain

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V] of the prepared rows → token ids int32 [R], which the rows have then; -1 in
        rows that have none and fail. Then the same rows are prepared for the tokens after."""
        count = len(logits)
        parameters = [torch.from_numpy(column[:count]) for column in self._parameters]
        positions = torch.from_numpy(self._positions[:count])
        token_ids = self._draw(logits, self._index[:count], *parameters, positions)
        slots = self._all_slots[:count]
        self._append_tokens(slots, token_ids, *self._row_columns, -1, positions)
        return token_ids
