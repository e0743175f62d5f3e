"""Masks for steps in flight, made as soon as the tokens that they depend on are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError, QuireError, RequestError
from quire.base.platform.interrupts import is_ctrl_c
from quire.plan.grammar import ANY_TOKEN, Mask
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.step import (
    DRAFT_OF_MODEL,
    EMPTY_INTS,
    IntArray,
    LateInput,
    MaskArray,
    RowFailure,
    StepPlan,
)

__all__ = ["LateMasks"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that waits for masks in a step, with the drafts that it verifies there."""

    slot: int
    sequence: Sequence
    drafts: IntArray

    @property
    def is_of_model(self) -> bool:
        """True if the drafts are still to be made."""
        return len(self.drafts) > 0 and self.drafts[0] == DRAFT_OF_MODEL


class LateMasks:
    """Tracks which rows of which steps in flight wait for masks. The masks of a step depend on the
    tokens of the step before, so they are made once that step's result is applied."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._steps: deque[tuple[int, list[_Row]]] = deque()

    def expect(self, plan: StepPlan, sampling: Slots) -> None:
        """Note a planned step in which `sampling` [R] sample, and the sequences that fork from
        them."""
        slots = [*sampling.tolist(), *(fork.dst for fork in plan.forks)]
        rows = [
            _Row(slot, sequence, EMPTY_INTS)
            for slot in slots
            if (sequence := self._table.at(slot)).group.grammar is not None
        ]
        if rows and len(plan.draft_slot):
            rows = [
                _Row(row.slot, row.sequence, plan.draft_token[plan.draft_slot == row.slot])
                for row in rows
            ]
        if rows:
            self._steps.append((plan.step_id, rows))

    def follow_model(self, step_id: int) -> bool:
        """Return whether masks of the oldest step in flight depend on drafts that a model makes."""
        return (
            bool(self._steps)
            and self._steps[0][0] == step_id
            and any(row.is_of_model for row in self._steps[0][1])
        )

    def of_step(self, step_id: int, made: Mapping[int, IntArray]) -> LateInput | None:
        """Return the late input of the oldest step in flight; None if it needs none or has it
        already. made: drafts that a model has made for the step, by slot."""
        if not self._steps or self._steps[0][0] != step_id:
            return None
        rows = [
            replace(row, drafts=made.get(row.slot, EMPTY_INTS)) if row.is_of_model else row
            for row in self._steps[0][1]
        ]
        return _late_input(step_id, [(row, self._masks_of(row)) for row in rows])

    def given(self, step_id: int) -> None:
        """Note that the late input of the oldest step in flight was handed over."""
        if self._steps and self._steps[0][0] == step_id:
            self._steps.popleft()

    def release(self) -> list[LateInput]:
        """Return the late inputs that lost steps in flight still wait for, so that these steps
        end."""
        lost = [_late_input(step_id, [(r, _any(r)) for r in rows]) for step_id, rows in self._steps]
        self._steps.clear()
        return lost

    def _masks_of(self, row: _Row) -> Items[Mask] | RowFailure:
        sequence = row.sequence
        group = sequence.group
        if sequence not in group.sequences or group.grammar is None:
            return _any(row)  # it has ended, and nobody reads what it draws
        is_here = sequence.slot >= 0
        tokens = self._table.known_tokens(sequence.slot) if is_here else sequence.token_ids
        try:
            if sequence.matcher is None:
                sequence.matcher = group.grammar.matcher()
            output = tokens[len(group.request.prompt_token_ids) :]
            masks = sequence.matcher.masks(output, row.drafts)
            if len(masks) != 1 + len(row.drafts):
                raise EngineError(f"{len(masks)} masks for {1 + len(row.drafts)} positions")
            return masks
        except QuireError as error:
            return RowFailure.of(row.slot, error)
        except BaseException as error:  # a panic of the library too must end with its request
            if is_ctrl_c(error):
                raise
            message = f"the grammar of this request failed ({error}): simplify it"
            return RowFailure.of(row.slot, RequestError(message))


def _any(row: _Row) -> Items[Mask]:
    return [ANY_TOKEN] * (1 + len(row.drafts))


def _late_input(step_id: int, found: list[tuple[_Row, Items[Mask] | RowFailure]]) -> LateInput:
    """Equal masks are sent once."""
    known: dict[bytes, int] = {}
    masks: list[MaskArray] = []
    index: list[int] = []
    slots: list[int] = []
    counts: list[int] = []
    failed: list[RowFailure] = []
    for row, given in found:
        if isinstance(given, RowFailure):
            failed.append(given)
            continue
        if any(mask is not None and masks and mask.shape != masks[0].shape for mask in given):
            failed.append(RowFailure(row.slot, "the masks of this request have another width"))
            continue
        slots.append(row.slot)
        counts.append(len(given))
        for mask in given:
            if mask is None:
                index.append(-1)
                continue
            place = known.setdefault(mask.tobytes(), len(masks))
            if place == len(masks):
                masks.append(mask)
            index.append(place)
    return LateInput(
        step_id,
        np.array(slots, np.int32),
        np.array(counts, np.int32),
        np.array(index, np.int32),
        np.stack(masks) if masks else np.zeros((0, 0), np.uint32),
        tuple(failed),
    )
