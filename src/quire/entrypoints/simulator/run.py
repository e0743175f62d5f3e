"""Serving of a trace on the virtual clock, by the real engine core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.entrypoints.simulator.system import BuiltSystem
from quire.protocol.request import EngineRequest, FinishReason

__all__ = ["Served", "serve"]

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Served:
    """A trace as a system served it.

    arrival_s, first_token_s, finished_s: float64 [requests], on the clock of the simulation; times
        of the last sequence of a request, the latter two of a search come together. output_tokens:
        tokens of one sequence of each request.
    mean_running: sequences in a step, averaged over busy time. num_steps, busy_s: steps and busy
    time of the device.
    trace_hash: equal for equal runs.
    """

    arrival_s: Seconds
    first_token_s: Seconds
    finished_s: Seconds
    output_tokens: npt.NDArray[np.int64]
    mean_running: float
    num_preempted: int
    num_steps: int
    busy_s: float
    trace_hash: str = ""

    @property
    def ttft_s(self) -> Seconds:
        """Seconds from arrival to the first token, by request."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Seconds:
        """Seconds per token after the first, by request; 0 where there is only one."""
        later = np.maximum(self.output_tokens - 1, 1)
        return (self.finished_s - self.first_token_s) / later

    @property
    def normalized_latency_s(self) -> float:
        """Mean over requests of seconds from arrival to end per output token (Orca's measure)."""
        return float(((self.finished_s - self.arrival_s) / self.output_tokens).mean())

    @property
    def requests_per_s(self) -> float:
        """Requests per second from a fifth to four fifths of them finished."""
        finished = np.sort(self.finished_s)
        low, high = len(finished) // 5, 4 * len(finished) // 5
        span = float(finished[high] - finished[low])
        return (high - low) / span if span else float("inf")

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of the outputs over the seconds from the first arrival to the last end."""
        seconds = float(self.finished_s.max() - self.arrival_s.min())
        return float(self.output_tokens.sum()) / seconds


def serve(
    system: BuiltSystem,
    requests: Sequence[EngineRequest],
    on_step: Callable[[], None] = lambda: None,
) -> Served:
    """Serve requests, in order of arrival and with handles 0, 1, 2, … over their sequences, until
    the last one ends. on_step: called after each step. EngineError if a request fails."""
    core, clock = system.core, system.clock
    num_handles = sum(request.params.n for request in requests)
    first, finished = np.full(num_handles, np.inf), np.zeros(num_handles)
    waiting = _by_arrival(requests)
    following = next(waiting, None)
    while following is not None or core.has_unfinished:
        while following is not None and following.arrival_time <= clock.now:
            core.add(following)
            following = next(waiting, None)
        if not core.has_unfinished:
            assert following is not None
            clock.wait_until(following.arrival_time)
            continue
        output = core.step(clock.now)
        now, handles = clock.now, output.handles
        if len(handles):
            first[handles] = np.minimum(first[handles], now)
        for finish in output.finished:
            if finish.reason not in (FinishReason.LENGTH, FinishReason.STOP):
                raise EngineError(f"a simulated request ended by {finish.reason}: {finish.message}")
            finished[finish.handle] = now
            first[finish.handle] = min(first[finish.handle], now)
        on_step()
    return _served(system, requests, first, finished)


def _served(
    system: BuiltSystem, requests: Sequence[EngineRequest], first: Seconds, finished: Seconds
) -> Served:
    starts = np.cumsum([0, *(request.params.n for request in requests)])[:-1]
    totals = system.executor.totals
    return Served(
        arrival_s=np.array([request.arrival_time for request in requests]),
        first_token_s=np.minimum.reduceat(first, starts),
        finished_s=np.maximum.reduceat(finished, starts),
        output_tokens=np.array([request.params.max_tokens for request in requests], np.int64),
        mean_running=totals.mean_rows,
        num_preempted=system.scheduler.stats().preempted_total,
        num_steps=totals.steps,
        busy_s=totals.busy_s,
        trace_hash=system.executor.trace_hash(),
    )


def _by_arrival(requests: Sequence[EngineRequest]) -> Iterator[EngineRequest]:
    handle, last = 0, 0.0
    for request in requests:
        if request.first_handle != handle or request.arrival_time < last:
            raise EngineError(
                f"request {request.request_id} has handle {request.first_handle} and arrives at "
                f"{request.arrival_time}: expected handle {handle}, at {last} s or later"
            )
        handle, last = handle + request.params.n, request.arrival_time
        yield request
