"""Late input: masks for the rows of a step, which arrive while its forward runs; and the drafts
that must be known to make these masks."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.compute.runner.rows import Slots
from quire.protocol.step import IntArray, LateInput, MaskArray, RowFailure

__all__ = ["LateInputs", "MadeDrafts", "RowMasks"]

ANY_TOKEN = -1
NO_MASK = "the engine gave no mask for this request's next token: send it again"


class RowMasks:
    """Masks of the rows of one step. words: uint32 [M, ceil(V / 32)], as in `LateInput`."""

    def __init__(self, late: LateInput) -> None:
        self.words: MaskArray = late.masks
        self._index = late.index
        counts = late.counts.astype(np.int64)
        firsts = (np.cumsum(counts) - counts).tolist()
        self._places = dict(
            zip(late.slots.tolist(), zip(firsts, counts.tolist(), strict=True), strict=True)
        )
        self._failed = {failure.slot: failure for failure in late.failed}

    def failures(self, slots: Collection[int]) -> list[RowFailure]:
        """Return the failures of waiting rows that have no masks."""
        return [
            self._failed.get(slot) or RowFailure(slot, NO_MASK)
            for slot in slots
            if slot not in self._places
        ]

    def index(self, slots: Slots, turn: int) -> npt.NDArray[np.int64]:
        """Return for each row [N] the mask of its token after `turn` drafts; -1 where any token is
        allowed. Rows without masks may take any."""
        found = np.full(len(slots), ANY_TOKEN, np.int64)
        for i, slot in enumerate(slots.tolist()):
            first, count = self._places.get(slot, (0, 0))
            if turn < count:
                found[i] = self._index[first + turn]
        return found

    def by_slot(self, slots: Slots, turn: int) -> Mapping[int, MaskArray]:
        """Return the masks that `index` refers to, by slot, of the rows that have one."""
        index = self.index(slots, turn)
        return {int(slots[i]): self.words[index[i]] for i in np.flatnonzero(index >= 0).tolist()}


class LateInputs:
    """Hands late input from the thread that gets it to the one that launches steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given: dict[int, LateInput] = {}
        self._is_closed = False

    def put(self, late: LateInput) -> None:
        """Take the late input of a step that was given to the runner."""
        with self._changed:
            self._given[late.step_id] = late
            self._changed.notify_all()

    def close(self) -> None:
        """Tell waiting threads that nothing will come any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, step_id: int) -> RowMasks:
        """Wait for the late input of a step; drop that of earlier steps.
        Raises EngineError if nothing will come."""
        with self._changed:
            self._changed.wait_for(lambda: step_id in self._given or self._is_closed)
            late = self._given.pop(step_id, None)
            self.forget_before(step_id)
        if late is None:
            raise EngineError(f"the engine was shut down while step {step_id} waited for masks")
        return RowMasks(late)

    def forget_before(self, step_id: int) -> None:
        """Drop late input of earlier steps, whose rows have failed meanwhile."""
        if not self._given:
            return
        with self._changed:
            for known in [known for known in self._given if known < step_id]:
                del self._given[known]


class MadeDrafts:
    """Passes the drafts of rows that wait for masks from the launching thread to the thread that
    makes the masks. Keeps only those of the last launched step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step_id = -1
        self._drafts: Mapping[int, IntArray] = {}
        self._is_closed = False

    def put(self, step_id: int, drafts: Mapping[int, IntArray]) -> None:
        """Note the drafts that a step verifies, by slot."""
        with self._changed:
            self._step_id, self._drafts = step_id, drafts
            self._changed.notify_all()

    def end(self, step_id: int) -> None:
        """Note that a step has no drafts but those that were put."""
        if self._step_id < step_id:
            self.put(step_id, {})

    def close(self) -> None:
        """Tell waiting threads that nothing will come any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def of_step(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """Return the drafts of a step, by slot; None if the step has not been launched yet. wait:
        until it has been."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._step_id >= step_id or self._is_closed)
            if self._step_id < step_id and not self._is_closed:
                return None
            return self._drafts if self._step_id == step_id else {}
