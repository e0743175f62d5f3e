"""A device that computes nothing: each step takes the time of a cost model on a virtual clock.

All tokens are the same; requests end at `max_tokens`. Candidates of beams have the probabilities
of a stick that is broken at uniform places again and again, about one nat of entropy per token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from quire.base.errors import EngineError, RequestError
from quire.entrypoints.simulator.row_counts import ComputedRows, RowCounts, Slots
from quire.entrypoints.simulator.step_cost import StepCost
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import ControlOp, MeasureRecovery, Report
from quire.protocol.media import MediaInfo
from quire.protocol.step import IntArray, LateInput, StepPlan, StepResult, TokenCandidates

__all__ = ["TOKEN", "SimulatedExecutor", "StepTotals", "VirtualClock"]

TOKEN = 3
"""The token that every row draws."""


class VirtualClock:
    """Seconds since a simulation began. Only waiting makes them pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, moment: float) -> None:
        """Let time pass; a moment that is over changes nothing."""
        self.now = max(self.now, moment)


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps. row_seconds: seconds times rows that computed in them."""

    steps: int = 0
    busy_s: float = 0.0
    row_seconds: float = 0.0

    @property
    def mean_rows(self) -> float:
        """Rows that compute, averaged over the time in which the device is busy."""
        return self.row_seconds / self.busy_s if self.busy_s else 0.0


class _Step:
    """A `StepFuture` whose result is there when the clock says so."""

    __slots__ = ("_clock", "_ends_at", "_result")

    def __init__(self, clock: VirtualClock, ends_at: float, result: StepResult) -> None:
        self._clock, self._ends_at, self._result = clock, ends_at, result

    def result(self, timeout: float | None = None) -> StepResult:
        """Let time pass to its end. TimeoutError if that is more than `timeout` seconds away."""
        if timeout is not None and self._ends_at > self._clock.now + timeout:
            self._clock.wait_until(self._clock.now + timeout)
            raise TimeoutError
        self._clock.wait_until(self._ends_at)
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.result(timeout)
        return None

    def done(self) -> bool:
        return self._clock.now >= self._ends_at


class SimulatedExecutor:
    """Executor of one simulated device, or of several that share a model.

    Copies to the host delay the step that needs their blocks; copies back run beside steps, one
    ticket after the other.
    """

    def __init__(
        self,
        cost: StepCost,
        clock: VirtualClock,
        *,
        max_num_seqs: int,
        seed: int = 0,
    ) -> None:
        """seed: random seed of the candidates of beams."""
        self._cost, self._clock = cost, clock
        self._rows = RowCounts(max_num_seqs)
        self._tokens = np.full(max_num_seqs, TOKEN, np.int32)
        self._tokens.flags.writeable = False
        self._rng = np.random.default_rng(seed)
        self._free_at = self._copies_end = 0.0
        self._tickets: dict[int, float] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self.totals = StepTotals()

    def start(self) -> Report:
        return Report(kernels="none: steps take simulated time", kernel_family="simulated")

    def control(self, op: ControlOp) -> Report:
        """Report, with the costs of the model if they are asked for; nothing else is to be done."""
        if isinstance(op, MeasureRecovery):
            return Report(kernel_family="simulated", recovery_costs=self._cost.recovery_costs())
        return self.start()

    def execute(self, plan: StepPlan) -> _Step:
        start = max(self._free_at, self._clock.now)
        rows = self._rows.compute(plan)
        num_sampled = len(rows.drawing) + len(plan.forks)
        seconds = self._cost.seconds(rows.num_computed, rows.num_tokens, num_sampled)
        seconds += self._cost.copy_s(len(plan.store_src))
        seconds += self._cost.duplicate_s(len(plan.copy_src))
        if self._cost.waits_for_host:
            seconds += self._cost.host_s(len(plan.enter), changes_rows=not plan.keeps_rows)
        self._start_copies(plan, start)
        if not len(rows.slots) and self._tickets:  # a step that only waits for news
            seconds = max(seconds, min(self._tickets.values()) - start)
        end = self._free_at = start + seconds
        result = self._end_step(plan, rows, seconds, end)
        self._count(plan, rows, result, seconds, end)
        return _Step(self._clock, end, result)

    def trace_hash(self) -> str:
        """Digest of all steps so far: when each ended, and which rows drew."""
        return self._digest.hexdigest()

    def put_media(self, handle: int, data: object) -> MediaInfo:
        raise RequestError(f"a simulated device takes no media ({handle}, {data!r:.60})")

    def drop_media(self, handles: Sequence[int]) -> None:
        pass

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        done = Future[None]()
        done.set_exception(RequestError(f"a simulated device has no adapter {ref.name} in {slot}"))
        return done

    def move_blocks(self, move: BlockMove) -> Future[MoveOutcome]:
        raise EngineError(f"a simulated device has no disk for move {move.ticket}")

    def cancel_move(self, ticket: int) -> None:
        raise EngineError(f"a simulated device has no disk for move {ticket}")

    def late(self, late: LateInput) -> None:
        """Take masks, which change no time."""

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """No draft is left to a model."""
        del step_id, wait
        return {}

    def shutdown(self) -> None:
        self._tickets.clear()

    def _start_copies(self, plan: StepPlan, start: float) -> None:
        for ticket in plan.started:
            num_blocks = int((plan.load_ticket == ticket).sum())
            self._copies_end = max(self._copies_end, start) + self._cost.copy_s(num_blocks)
            self._tickets[ticket] = self._copies_end

    def _end_step(
        self, plan: StepPlan, rows: ComputedRows, seconds: float, end: float
    ) -> StepResult:
        drawing = rows.drawing
        if plan.forks:
            for fork in plan.forks:
                self._rows.fork(fork.src, fork.dst)
            drawing = np.concatenate([drawing, [fork.dst for fork in plan.forks]])
        candidates: dict[int, tuple[TokenCandidates, ...]] = {}
        if self._rows.has_beams:
            choosing = self._rows.num_candidates[drawing] > 0
            candidates = self._candidates_of(drawing[choosing])
            drawing = drawing[~choosing]
        done: tuple[int, ...] = ()
        if self._tickets:
            done = tuple(ticket for ticket, moment in self._tickets.items() if moment <= end)
            for ticket in done:
                del self._tickets[ticket]
        self._rows.append(drawing)
        return StepResult(
            plan.step_id,
            drawing.astype(np.int32),
            self._tokens[: len(drawing)],
            candidates,
            seconds=seconds,
            done=done,
        )

    def _candidates_of(self, slots: Slots) -> dict[int, tuple[TokenCandidates, ...]]:
        counts = self._rows.num_candidates[slots]
        width = int(counts.max(initial=1))
        breaks = self._rng.random((len(slots), width))
        left = np.cumprod(1.0 - breaks, axis=1)
        parts = breaks * np.concatenate([np.ones((len(slots), 1)), left[:, :-1]], axis=1)
        scores = np.log(np.sort(parts, axis=1)[:, ::-1] + 1e-30)
        tokens = np.arange(TOKEN + 1, TOKEN + 1 + width, dtype=np.int32)
        return {
            slot: (TokenCandidates(tokens[:count], scores[i, :count].copy()),)
            for i, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True))
        }

    def _count(
        self, plan: StepPlan, rows: ComputedRows, result: StepResult, seconds: float, end: float
    ) -> None:
        totals = self.totals
        totals.steps += 1
        totals.busy_s += seconds
        totals.row_seconds += seconds * len(rows.slots)
        self._digest.update(struct.pack("<qd", plan.step_id, end) + result.slots.tobytes())
