"""The real scheduler over a device that computes nothing and takes the time of a cost model.

Times are exact and the same on any machine. Tokens are constants, so requests end at `max_tokens`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cost_model import StepCost

from quire.protocol import EngineRequest, StepPlan, StepResult
from quire.runner.rows import RowTable
from quire.scheduler import Scheduler

__all__ = ["DEPTH", "Served", "SimulatedDevice", "serve"]

DEPTH = 2
"""Steps in flight, as in the engine."""
TOKEN = 3


class SimulatedDevice:
    """Rows without a model: says how long a step takes, and which rows draw a token."""

    def __init__(
        self, cost: StepCost, max_num_seqs: int, max_model_len: int, block_size: int
    ) -> None:
        self._cost = cost
        self._rows = RowTable(max_num_seqs, max_model_len, [block_size])

    def execute(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Seconds, and the result."""
        self._rows.apply(plan)
        rows = self._rows.scheduled()
        seconds = self._cost.seconds(rows.num_computed, rows.num_tokens)
        self._rows.commit_computed(rows)
        drawn = rows.slots[rows.samples]
        tokens = np.full(len(drawn), TOKEN, np.int32)
        self._rows.append(drawn, tokens)
        return seconds, StepResult(plan.step_id, drawn.astype(np.int32), tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """first_token_s, finished_s: by request, on the clock of the simulation. plan_us: of each call
    of `plan`, on this machine's clock. mean_running: sequences, over simulated time."""

    first_token_s: list[float]
    finished_s: list[float]
    plan_us: list[float]
    mean_running: float
    num_preempted: int


def serve(
    scheduler: Scheduler, device: SimulatedDevice, requests: Sequence[EngineRequest]
) -> Served:
    """All requests (of one sequence each, in order of arrival), on a clock that starts at 0."""
    first: dict[int, float] = {}
    finished: dict[int, float] = {}
    plan_us: list[float] = []
    in_flight: deque[tuple[float, float, StepResult]] = deque()
    waiting = deque(requests)
    now = device_free = busy_s = running_s = 0.0
    while waiting or scheduler.has_unfinished or in_flight:
        while waiting and waiting[0].arrival_time <= now:
            scheduler.add(waiting.popleft())
        while len(in_flight) < DEPTH and scheduler.has_unfinished:
            started = time.perf_counter_ns()
            plan = scheduler.plan(now)
            plan_us.append((time.perf_counter_ns() - started) / 1000)
            if plan is None:
                break
            seconds, result = device.execute(plan)
            device_free = max(device_free, now) + seconds
            in_flight.append((seconds, device_free, result))
        if not in_flight:
            now = waiting[0].arrival_time
            continue
        seconds, now, result = in_flight.popleft()
        busy_s += seconds
        running_s += seconds * scheduler.stats().num_running
        output = scheduler.apply(result)
        for handle in output.handles.tolist():
            first.setdefault(handle, now)
        for finish in output.finished:
            finished[finish.handle] = now
    handles = [request.first_handle for request in requests]
    return Served(
        first_token_s=[first[handle] for handle in handles],
        finished_s=[finished[handle] for handle in handles],
        plan_us=plan_us,
        mean_running=running_s / busy_s,
        num_preempted=scheduler.stats().preempted_total,
    )
