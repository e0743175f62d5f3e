"""The draws of captured steps."""

from __future__ import annotations

import numpy as np
import torch

from quire.runner.rows import Slots
from quire.sampling import Draw, SamplingState

__all__ = ["CapturedDraws"]


class CapturedDraws:
    """For rows that ask no more than a token. Where the draw reads its parameters stays the same:
    whoever captured it sets them anew before each replay."""

    def __init__(self, sampling: SamplingState, draw: Draw, max_rows: int) -> None:
        """draw: the operation `quire.ops.draw`, on the host."""
        self._sampling = sampling
        self._draw = draw
        self._slots = np.zeros(0, np.int64)
        self._version = -1
        self._index = torch.arange(max_rows)
        self._positions = np.zeros(max_rows, np.int64)
        self._temperature = np.zeros(max_rows, np.float64)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.zeros(max_rows, np.float64)
        self._min_p = np.zeros(max_rows, np.float64)
        self._seed = np.zeros(max_rows, np.int64)
        self._sample_index = np.zeros(max_rows, np.int64)
        self._is_plain = False

    def prepare(self, slots: Slots, positions: Slots) -> bool:
        """Row i of the next draw is that of slots[i], for its token at positions[i]. False if some
        of these rows ask for more than a draw."""
        count = len(slots)
        self._positions[:count] = positions
        if self._version != self._sampling.version or not np.array_equal(slots, self._slots):
            self._set_parameters(slots)
        return self._is_plain

    def _set_parameters(self, slots: Slots) -> None:
        of, count = self._sampling, len(slots)
        self._temperature[:count] = np.where(of.greedy[slots], 0.0, of.temperature[slots])
        self._top_k[:count] = of.top_k[slots]
        self._top_p[:count] = of.top_p[slots]
        self._min_p[:count] = of.min_p[slots]
        self._seed[:count] = of.seed[slots].view(np.int64)
        self._sample_index[:count] = of.sample_index[slots]
        self._is_plain = of.is_plain(slots)
        self._slots, self._version = slots, of.version

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, V] of the prepared rows → token ids int32 [R]; -1 in rows that have none."""
        columns = (
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seed,
            self._sample_index,
            self._positions,
        )
        count = len(logits)
        parameters = [torch.from_numpy(column[:count]) for column in columns]
        return self._draw(logits, self._index[:count], *parameters)
