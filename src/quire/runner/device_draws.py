"""Next tokens that a device draws, and takes into its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.step import RowFailure
from quire.runner.device_queue import DeviceQueue
from quire.runner.device_state import DeviceState
from quire.runner.rows import Slots
from quire.sampling import DeviceExtras, DeviceHistory, DeviceLogprobs, DeviceSampler

__all__ = ["DeviceDraws", "DrawnPiece"]


@dataclass(frozen=True, slots=True)
class DrawnPiece:
    """slots [N] on the host, their token ids int32 [N] on the device, and what more they asked."""

    slots: Slots
    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None


class DeviceDraws:
    """extras: for rows that ask for more than a draw. append_tokens: the operation."""

    def __init__(
        self,
        state: DeviceState,
        sampler: DeviceSampler,
        extras: DeviceExtras,
        append_tokens: Callable[..., None],
        queue: DeviceQueue,
    ) -> None:
        self._state = state
        self._sampler = sampler
        self._extras = extras
        self._history = DeviceHistory(
            state.row_tensors.token_ids, state.num_prompt, state.num_tokens
        )
        self._append_tokens = append_tokens
        self._queue = queue
        self.failures = extras.failures

    def serves(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Of each row, whether the device draws its token; else the host has to."""
        return self._extras.serves(slots)

    def is_graphable(self, slots: Slots) -> bool:
        """Whether `draw_and_append` is all that these rows ask."""
        return self._sampler.is_graphable(slots)

    def draw(
        self, logits: torch.Tensor, slots: Slots, index: Slots
    ) -> tuple[list[DrawnPiece], list[RowFailure]]:
        """Draw for `slots` [N] from rows `index` [N] of logits [R, V], in pieces; on an exception
        in halves, so that only the row at fault fails."""
        try:
            where = self._state.inbox.drawing_of(slots)
            where = self._queue.upload(slots) if where is None else where
            is_whole = np.array_equal(index, np.arange(len(logits)))
            rows = None if is_whole else self._queue.upload(index)
            if self.is_graphable(slots):
                token_ids = self.draw_and_append(logits, where, rows)
                return [DrawnPiece(slots, token_ids, None)], []
            positions = self._state.num_tokens[where]
            sample = self._extras.sample(logits, slots, where, positions, self._history, rows)
            self._append(where, sample.token_ids)
            return [DrawnPiece(slots, sample.token_ids, sample.logprobs)], []
        except Exception as error:  # noqa: BLE001  whatever it is, it must end with its row
            if len(slots) == 1:
                message = f"the sampler could not draw for this request ({error}): send it again"
                return [], [RowFailure(int(slots[0]), message)]
        middle = len(slots) // 2
        drawn, failed = self.draw(logits, slots[:middle], index[:middle])
        others, more = self.draw(logits, slots[middle:], index[middle:])
        return drawn + others, failed + more

    def draw_and_append(
        self, logits: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Token ids int32 [N] of `slots` int64 [N], whose rows have them then. rows: int64 [N],
        which logits each draws from. Asks the host nothing, so it can be captured."""
        positions = self._state.num_tokens[slots]
        token_ids = self._sampler.sample(logits, slots, positions, rows).token_ids
        self._append(slots, token_ids)
        return token_ids

    def _append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        state = self._state
        self._append_tokens(
            slots,
            token_ids,
            state.row_tensors.num_computed,
            state.num_tokens,
            state.row_tensors.token_ids,
            state.spare,
            None,
        )
