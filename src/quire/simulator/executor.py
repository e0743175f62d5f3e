"""A device that computes nothing: each step takes the time of a cost model on a virtual clock.

Rows are those of the real runner, so that a plan which computes what is not there is refused. All
tokens are the same; requests end at `max_tokens`. Candidates of beams have the probabilities of a
stick that is broken at uniform places again and again, about one nat of entropy per token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from quire.config.kv_layout import KVLayout
from quire.errors import EngineError, RequestError
from quire.protocol.adapters import AdapterRef
from quire.protocol.control import ControlOp, MeasureRecovery, Report
from quire.protocol.media import MediaInfo
from quire.protocol.step import LateInput, StepPlan, StepResult, TokenCandidates
from quire.runner.drafts import counts_of, draw_in_turns
from quire.runner.rows import RowTable, ScheduledRows, Slots
from quire.simulator.step_cost import StepCost

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
        layout: KVLayout,
        *,
        max_num_seqs: int,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        """seed: of the candidates of beams."""
        self._cost, self._clock = cost, clock
        tokens_per_block = [group.tokens_per_block for group in layout.groups]
        self._rows = RowTable(max_num_seqs, max_model_len, tokens_per_block)
        self._num_candidates = np.zeros(max_num_seqs, np.int64)
        self._has_beams = False  # ever: a plain step is not to pay for beams
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
        self._rows.apply(plan)
        rows = self._rows.scheduled()
        seconds = self._cost.copy_s(len(plan.swap_out_src))
        seconds += self._cost.duplicate_s(len(plan.copy_src))
        num_sampled = int(np.count_nonzero(rows.samples)) + len(plan.forks)
        seconds += self._cost.seconds(rows.num_computed, rows.num_tokens, num_sampled)
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

    def late(self, late: LateInput) -> None:
        """Take masks, which change no time."""

    def shutdown(self) -> None:
        self._tickets.clear()

    def _start_copies(self, plan: StepPlan, start: float) -> None:
        for ticket in plan.started:
            num_blocks = int((plan.swap_in_ticket == ticket).sum())
            self._copies_end = max(self._copies_end, start) + self._cost.copy_s(num_blocks)
            self._tickets[ticket] = self._copies_end

    def _end_step(
        self, plan: StepPlan, rows: ScheduledRows, seconds: float, end: float
    ) -> StepResult:
        for row in plan.enter:
            if row.pooling is not None:
                raise EngineError(f"slot {row.slot} pools, and a simulated device has no vectors")
            self._num_candidates[row.slot] = row.num_candidates
            self._has_beams |= row.num_candidates > 0
        if len(plan.start_fork_dst):
            self._num_candidates[plan.start_fork_dst] = self._num_candidates[plan.start_fork_src]
        self._rows.commit_computed(rows)
        drawing = rows.slots[rows.samples]
        if plan.forks:
            drawing = np.concatenate([drawing, [self._fork(f.src, f.dst) for f in plan.forks]])
        candidates: dict[int, tuple[TokenCandidates, ...]] = {}
        if self._has_beams:
            choosing = self._num_candidates[drawing] > 0
            candidates = self._candidates_of(drawing[choosing])
            drawing = drawing[~choosing]
        done = tuple(ticket for ticket, moment in self._tickets.items() if moment <= end)
        for ticket in done:
            del self._tickets[ticket]
        if len(plan.draft_slot):
            drawn = draw_in_turns(
                self._rows, drawing, lambda index, _: np.full(len(index), TOKEN, np.int32)
            )
            slots, counts = drawn.slots.astype(np.int32), counts_of(drawn)
            token_ids = drawn.token_ids
        else:
            slots, counts = drawing.astype(np.int32), None
            token_ids = self._tokens[: len(drawing)]
            self._rows.append(drawing, token_ids)
        return StepResult(
            plan.step_id, slots, token_ids, candidates, seconds=seconds, counts=counts, done=done
        )

    def _fork(self, src: int, dst: int) -> int:
        self._rows.fork(src, dst)
        self._num_candidates[dst] = self._num_candidates[src]
        return dst

    def _candidates_of(self, slots: Slots) -> dict[int, tuple[TokenCandidates, ...]]:
        width = int(self._num_candidates[slots].max(initial=1))
        breaks = self._rng.random((len(slots), width))
        left = np.cumprod(1.0 - breaks, axis=1)
        parts = breaks * np.concatenate([np.ones((len(slots), 1)), left[:, :-1]], axis=1)
        scores = np.log(np.sort(parts, axis=1)[:, ::-1] + 1e-30)
        tokens = np.arange(TOKEN + 1, TOKEN + 1 + width, dtype=np.int32)
        return {
            slot: (TokenCandidates(tokens[:count], scores[i, :count].copy()),)
            for i, (slot, count) in enumerate(
                zip(slots.tolist(), self._num_candidates[slots].tolist(), strict=True)
            )
        }

    def _count(
        self, plan: StepPlan, rows: ScheduledRows, result: StepResult, seconds: float, end: float
    ) -> None:
        totals = self.totals
        totals.steps += 1
        totals.busy_s += seconds
        totals.row_seconds += seconds * len(rows.slots)
        self._digest.update(struct.pack("<qd", plan.step_id, end) + result.slots.tobytes())
