"""Steps that may still be computed while the next one is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.compute.runner.device.queue import Arrival
from quire.compute.runner.drafts import counts_of
from quire.compute.runner.draws import Sampled
from quire.compute.runner.forward import NOT_FINITE
from quire.compute.runner.pooling import PoolPiece, VectorPools
from quire.compute.runner.rows import RowTable, Slots
from quire.compute.sampling import NO_TOKEN, DeviceLogprobs
from quire.protocol.step import (
    FloatArray,
    PromptLogprobs,
    RowFailure,
    RowTokens,
    StepResult,
    TokenLogprobs,
)

__all__ = ["RunningStep", "Failures", "HostPart", "Tenancy"]

Failures = Callable[[npt.NDArray[np.int32], Slots, Slots], tuple[RowFailure, ...]]
"""(token ids, slots, positions) of rows → a sentence for each of those without a token."""


@dataclass(slots=True)
class HostPart:
    """The host's part of a step's result, known when it was launched; fields as in `StepResult`,
    but for num_drafts, which is by slot."""

    sampled: Sampled = field(default_factory=Sampled)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict[int, PromptLogprobs])
    failed: list[RowFailure] = field(default_factory=list[RowFailure])
    num_drafts: Slots | None = None


class Tenancy:
    """Identity of the sequence in each slot, by a number that no two share; and which sequences
    have failed on the device, as far as results have told."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.zeros(num_slots, np.int64)
        self._failed = np.full(num_slots, -1, np.int64)
        self._next = 1

    def begin(self, slot: int) -> None:
        """Another sequence is in the slot."""
        self._numbers[slot] = self._next
        self._next += 1

    def of(self, slots: Slots) -> Slots:
        """The sequences that are in these slots."""
        return self._numbers[slots]

    def fail(self, slots: Slots, numbers: Slots) -> None:
        """These sequences have failed."""
        self._failed[slots] = numbers

    def has_failed(self, slots: Slots, numbers: Slots) -> npt.NDArray[np.bool_]:
        """Return for each of these sequences whether it has failed; ask before a later one in its
        slot can fail."""
        return self._failed[slots] == numbers


@dataclass(slots=True)
class _OnDevice:
    """Rows [N] whose results come from the device in one array. positions: places of the tokens
    that they draw."""

    slots: Slots
    numbers: Slots
    positions: Slots


class RunningStep:
    """A `PendingStep`. Results are made in the order of the steps, by whoever asks first."""

    def __init__(
        self,
        step_id: int,
        before: RunningStep | None,
        tenancy: Tenancy,
        failures: Failures,
        host: HostPart,
        pools: VectorPools,
    ) -> None:
        """before: the step launched before, if its result is not there yet. pools: partial vectors
        of all steps."""
        self._step_id = step_id
        self._before = before
        self._tenancy = tenancy
        self._failures = failures
        self._host = host
        self._pools = pools
        self._pooled: list[tuple[PoolPiece, _OnDevice]] = []
        self._drawn: list[_OnDevice] = []
        self._unfinished: list[_OnDevice] = []
        self._logprobs: Sequence[DeviceLogprobs | None] = ()
        self._arrival: Arrival | None = None
        self._lock = threading.Lock()
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._settled_tokens: list[npt.NDArray[np.int32]] = []

    def expect(
        self,
        drawn: list[tuple[Slots, Slots]],
        unfinished: list[Slots],
        arrival: Arrival | None,
        logprobs: Sequence[DeviceLogprobs | None] = (),
        pooled: Sequence[PoolPiece] = (),
    ) -> None:
        """Expect the device's results: for each (slots, positions) drawn the token ids, then for
        each slots in the middle of a prompt whether they are sound, then the hidden states of each
        row that pools, then the tensors of the log-probabilities of each that was drawn."""
        numbers = self._tenancy.of
        self._drawn = [_OnDevice(slots, numbers(slots), at) for slots, at in drawn]
        self._unfinished = [_OnDevice(slots, numbers(slots), slots) for slots in unfinished]
        for piece in pooled:
            slots = np.array([piece.slot])
            self._pooled.append((piece, _OnDevice(slots, numbers(slots), slots)))
        self._arrival = arrival
        self._logprobs = logprobs

    def has_drawn(self, slots: Slots) -> bool:
        """Return whether some of the sequences in these slots get tokens by this step."""
        return any(
            bool(np.isin(slots, each.slots[each.numbers == self._tenancy.of(each.slots)]).any())
            for each in self._drawn
        )

    @property
    def is_over(self) -> bool:
        """True if the result is there, or the error that ended the step."""
        return self._result is not None or self._error is not None

    def result(self) -> StepResult:
        """Wait for this step and those before it."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = self._make_result()
                except BaseException as error:
                    self._error = error
                    raise
                self._before = None
            return self._result

    def _make_result(self) -> StepResult:
        if self._before is not None:
            self._before.result()
        arrays = [] if self._arrival is None else self._arrival.wait()
        self._arrival = None
        host, failed = self._host, [*self._host.failed, *self._host.sampled.failed]
        given = host.sampled
        slots, token_ids, counts = (
            [given.drawn.slots],
            [given.drawn.token_ids],
            [given.drawn.counts],
        )
        live_tokens: list[npt.NDArray[np.int32]] = []
        for rows, tokens in zip(self._drawn, arrays, strict=False):
            is_live = ~self._tenancy.has_failed(rows.slots, rows.numbers)
            is_drawn = is_live & (tokens >= 0)
            live_tokens.append(np.where(is_drawn, tokens, NO_TOKEN))
            slots.append(rows.slots[is_drawn])
            token_ids.append(tokens[is_drawn])
            counts.append(np.ones(len(slots[-1]), np.int64))
            broken = is_live & ~is_drawn
            failed += self._failures(tokens[broken], rows.slots[broken], rows.positions[broken])
            self._tenancy.fail(rows.slots[broken], rows.numbers[broken])
            self._settled_tokens.append(tokens)
        first, last = len(self._drawn), len(self._drawn) + len(self._unfinished)
        of_pools = arrays[last : last + len(self._pooled)]
        rest = arrays[last + len(self._pooled) :]
        logprobs = {**given.logprobs, **self._read_logprobs(live_tokens, rest)}
        for rows, is_sound in zip(self._unfinished, arrays[first:last], strict=True):
            broken = ~is_sound & ~self._tenancy.has_failed(rows.slots, rows.numbers)
            failed += [RowFailure(slot, NOT_FINITE) for slot in rows.slots[broken].tolist()]
            self._tenancy.fail(rows.slots[broken], rows.numbers[broken])
        vectors = self._pool(of_pools, failed)
        drawn = RowTokens(np.concatenate(slots), np.concatenate(counts), np.concatenate(token_ids))
        return StepResult(
            step_id=self._step_id,
            slots=drawn.slots.astype(np.int32),
            token_ids=drawn.token_ids.astype(np.int32),
            counts=counts_of(drawn),
            candidates=given.candidates,
            logprobs=logprobs,
            prompt_logprobs=host.prompt_logprobs,
            failed=tuple(failed),
            vectors=vectors,
            num_drafts=None
            if host.num_drafts is None
            else host.num_drafts[drawn.slots].astype(np.int32),
        )

    def _pool(
        self, arrays: Sequence[np.ndarray], failed: list[RowFailure]
    ) -> dict[int, FloatArray]:
        """Return the vectors of prompts that are complete, by slot. arrays: hidden states of each
        piece."""
        vectors: dict[int, FloatArray] = {}
        for (piece, row), hidden in zip(self._pooled, arrays, strict=True):
            if self._tenancy.has_failed(row.slots, row.numbers).any():
                continue
            if not np.isfinite(hidden).all():
                self._tenancy.fail(row.slots, row.numbers)
                failed.append(RowFailure(piece.slot, NOT_FINITE))
                continue
            vector = self._pools.take(piece, hidden)
            if vector is not None:
                vectors[piece.slot] = vector
        return vectors

    def _read_logprobs(
        self, live_tokens: Sequence[npt.NDArray[np.int32]], arrays: Sequence[np.ndarray]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return log-probabilities by slot. live_tokens: drawn tokens of each piece; NO_TOKEN where
        a row has failed."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        start = 0
        for tokens, logprobs in zip(live_tokens, self._logprobs, strict=False):
            if logprobs is not None:
                stop = start + len(logprobs.tensors)
                by_slot = logprobs.by_slot(tokens, arrays[start:stop])
                found |= {slot: (entry,) for slot, entry in by_slot.items()}
                start = stop
        return found

    def settle(self, rows: RowTable) -> None:
        """Tell the host's rows what the result has told; it is there. In the launching thread."""
        for each, tokens in zip(self._drawn, self._settled_tokens, strict=False):
            is_there = self._tenancy.of(each.slots) == each.numbers
            slots, places = each.slots[is_there], each.positions[is_there]
            rows.token_ids[slots, places] = tokens[is_there]
        for each in (*self._drawn, *self._unfinished, *(row for _, row in self._pooled)):
            is_there = self._tenancy.of(each.slots) == each.numbers
            is_broken = is_there & self._tenancy.has_failed(each.slots, each.numbers)
            rows.failed[each.slots[is_broken]] = True
