"""A step's input from the host, brought to the device by one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.compute.runner.device.arena import Words
from quire.compute.runner.device.queue import DeviceQueue, Mark
from quire.compute.runner.kernel_rows import RowList
from quire.compute.runner.rows import Slots

__all__ = ["Inbox"]

NUM_BUFFERS = 4
"""Number of buffers in host memory: two steps are in flight, and one is being written."""

MAX_UPDATES = 2**16
"""Words that one copy changes; a plan that changes more takes several."""


class Inbox:
    """Places on the device that stay, so that a captured step finds its rows in them.

    slots: int64 [max_rows], padded with the spare slot. starts: int32 [max_rows + 1]. drawing:
    int64 [max_rows].
    """

    def __init__(
        self, queue: DeviceQueue, max_rows: int, spare: int, max_updates: int = MAX_UPDATES
    ) -> None:
        self._queue = queue
        self._spare = spare
        self._max_updates = max_updates
        self._num_header = 4 * max_rows + (max_rows + 1 + 1) // 2 * 2
        num_words = self._num_header + 2 * max_updates
        self._words = torch.zeros(num_words, dtype=torch.int32, device=queue.device)
        self._buffers = [queue.host_buffer(num_words) for _ in range(NUM_BUFFERS)]
        self._marks: list[Mark | None] = [None] * NUM_BUFFERS
        self._next = 0
        self._header = np.full(self._num_header, -1, np.int32)  # as it is on the device
        self.slots = self._words[: 2 * max_rows].view(torch.int64)
        self.drawing = self._words[2 * max_rows : 4 * max_rows].view(torch.int64)
        self.starts = self._words[4 * max_rows :][: max_rows + 1]
        self._max_rows = max_rows

    def send(
        self, rows: RowList | None, updates: Sequence[Words] = ()
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Send the rows of the next step (None: the rows of the last one) and one batch of updates
        to the device. Return the indices and values of the updates there, int32 [N] each, or None
        without updates; the next call overwrites them. Data that the device already has is not sent
        again."""
        header = self._header if rows is None else self._pack(rows)
        changed = rows is not None and not np.array_equal(header, self._header)
        count = sum(len(each.indices) for each in updates)
        if not changed and not count:
            return None
        buffer = self._take_buffer()
        host = buffer.numpy()
        first = 0 if changed else self._num_header
        if changed:
            host[: self._num_header] = header
            self._header = header
        middle, end = self._num_header + count, self._num_header + 2 * count
        at = self._num_header
        for each in updates:
            size = len(each.indices)
            host[at : at + size] = each.indices
            host[at + count : at + count + size] = each.values
            at += size
        self._marks[self._next] = self._queue.copy_in(buffer[first:end], self._words[first:end])
        self._next = (self._next + 1) % NUM_BUFFERS
        if not count:
            return None
        return self._words[self._num_header : middle], self._words[middle:end]

    def drawing_of(self, slots: Slots) -> torch.Tensor | None:
        """Return these slots [N] on the device, if they are the drawing rows that were sent
        last."""
        sent = self._header[2 * self._max_rows : 4 * self._max_rows].view(np.int64)
        return self.drawing[: len(slots)] if np.array_equal(sent[: len(slots)], slots) else None

    def batches(self, updates: Sequence[Words]) -> list[list[Words]]:
        """The updates in batches that one `send` takes; the last may be empty."""
        pieces: list[list[Words]] = [[]]
        room = self._max_updates
        for each in updates:
            start = 0
            while len(each.indices) - start > room:
                part = slice(start, start + room)
                pieces[-1].append(Words(each.indices[part], each.values[part]))
                pieces.append([])
                start, room = start + room, self._max_updates
            pieces[-1].append(Words(each.indices[start:], each.values[start:]))
            room -= len(each.indices) - start
        return pieces

    def _take_buffer(self) -> torch.Tensor:
        """Return the host buffer that was sent longest ago, once the device has read it."""
        mark = self._marks[self._next]
        if mark is not None:
            mark.wait()
        return self._buffers[self._next]

    def _pack(self, rows: RowList) -> np.ndarray:
        words = np.zeros(self._num_header, np.int32)
        wide = words[: 4 * self._max_rows].view(np.int64).reshape(2, self._max_rows)
        wide[:] = self._spare
        wide[0, : len(rows.slots)] = rows.slots
        wide[1, : len(rows.drawing)] = rows.drawing
        words[4 * self._max_rows :][: len(rows.starts)] = rows.starts
        return words
