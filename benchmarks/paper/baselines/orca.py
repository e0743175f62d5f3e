"""Orca (Yu et al. 2022) in three versions, by what they know of the lengths of outputs.

Iteration-level scheduling like ours, but each sequence gets one contiguous piece of KV memory when
it starts, for its prompt and all of its output; pieces come from a buddy allocator. Nothing is
shared, nothing is preempted, and a prompt is computed whole in one step. Of several sequences of a
request the prompt is computed once and copied for nothing, which the paper does not say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.paper.baselines.buddy import BuddyAllocator

from quire.base.errors import ConfigError
from quire.entrypoints.simulator.run import Served
from quire.entrypoints.simulator.step_cost import StepCost
from quire.entrypoints.simulator.workloads.trace import TraceRequest

__all__ = ["RESERVATIONS", "OrcaMemory", "Reservation", "serve_orca"]

MAX_LEN = 2048
"""The most that a sequence may have, prompt and output. Orca (Max) reserves it."""

Reservation = Callable[[int, int], int]
"""(prompt tokens, output tokens) → slots that are reserved."""


def _pow2(prompt: int, output: int) -> int:
    return prompt + (1 << (output - 1).bit_length())


RESERVATIONS: Mapping[str, Reservation] = {
    "oracle": lambda prompt, output: prompt + output,
    "pow2": _pow2,
    "max": lambda prompt, output: max(MAX_LEN, prompt + output),
}
"""Orca (Oracle) knows the output, (Pow2) its next power of two, (Max) the model's limit."""


@dataclass(slots=True)
class OrcaMemory:
    """Slots over time, in slot seconds while requests wait. held: slots with K/V. reserved: slots
    for tokens that will come. internal: slots never used by their owner. free: slots of no piece,
    though requests wait."""

    held: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    free: float = 0.0

    def shares(self) -> dict[str, float]:
        """Shares of the memory, 0 … 1; all 0 if no request ever waited."""
        total = self.held + self.reserved + self.internal + self.free
        parts = ("held", "reserved", "internal", "free")
        return {name: getattr(self, name) / total if total else 0.0 for name in parts}


@dataclass(slots=True)
class _Rows:
    """Sequences that compute, by place; `left` 0 is a free place."""

    owner: np.ndarray
    computed: np.ndarray
    tokens: np.ndarray
    left: np.ndarray
    pieces: dict[int, tuple[int, int]]


def serve_orca(
    trace: Sequence[TraceRequest],
    cost: StepCost,
    reservation: Reservation,
    *,
    num_slots: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    memory: OrcaMemory | None = None,
) -> Served:
    """Serve a trace in order of arrival, on a clock that starts at 0. cost: cost of steps with K/V
    in one piece. memory: takes the use of the slots. ConfigError if a request can
    never be served."""
    buddies = BuddyAllocator(num_slots)
    rows = _Rows(*np.zeros((4, max_num_seqs), np.int64), pieces={})
    waiting = deque(enumerate(trace))
    first = np.full(len(trace), np.inf)
    finished = np.zeros(len(trace))
    now = busy_s = row_seconds = 0.0
    num_steps = num_live = 0
    may_enter = True  # else the first that waits had no room, and there is no more now
    while waiting or num_live:
        budget = max_num_batched_tokens - num_live
        num_before = len(waiting)
        while may_enter and waiting and waiting[0][1].arrival_s <= now:
            index, request = waiting[0]
            if not _enter(index, request, rows, buddies, reservation, budget):
                if not num_live:
                    raise ConfigError(f"Request {index + 1} never fits {num_slots} slots")
                may_enter = len(waiting) < num_before  # the budget of others was taken
                break
            budget -= request.prompt_tokens
            num_live += request.n
            waiting.popleft()
        if not num_live:
            now = waiting[0][1].arrival_s
            continue
        live = np.flatnonzero(rows.left)
        seconds = cost.seconds(rows.computed[live], rows.tokens[live], len(live))
        if memory is not None and waiting and waiting[0][1].arrival_s <= now:
            _account(memory, rows, live, buddies, seconds)
        now, busy_s, num_steps = now + seconds, busy_s + seconds, num_steps + 1
        row_seconds += seconds * len(live)
        first[rows.owner[live]] = np.minimum(first[rows.owner[live]], now)
        rows.computed[live] += rows.tokens[live]
        rows.tokens[live] = 1
        rows.left[live] -= 1
        ended = live[rows.left[live] == 0]
        for place in ended.tolist():
            finished[rows.owner[place]] = now
            buddies.release(*rows.pieces.pop(place))
        num_live -= len(ended)
        may_enter |= len(ended) > 0
    return Served(
        arrival_s=np.array([request.arrival_s for request in trace]),
        first_token_s=first,
        finished_s=finished,
        output_tokens=np.array([request.output_tokens for request in trace], np.int64),
        mean_running=row_seconds / busy_s,
        num_preempted=0,
        num_steps=num_steps,
        busy_s=busy_s,
    )


def _enter(
    index: int,
    request: TraceRequest,
    rows: _Rows,
    buddies: BuddyAllocator,
    reservation: Reservation,
    budget: int,
) -> bool:
    """Give the sequences of a request places and memory; whether there was room for all."""
    places = np.flatnonzero(rows.left == 0)[: request.n]
    if request.prompt_tokens > budget or len(places) < request.n:
        return False
    slots = reservation(request.prompt_tokens, request.output_tokens)
    pieces: list[tuple[int, int]] = []
    for _ in range(request.n):
        piece = buddies.allocate(slots)
        if piece is None:
            for given in pieces:
                buddies.release(*given)
            return False
        pieces.append(piece)
    for place, piece in zip(places.tolist(), pieces, strict=True):
        rows.pieces[place] = piece
        is_first = piece is pieces[0]
        rows.owner[place], rows.left[place] = index, request.output_tokens
        rows.computed[place] = 0 if is_first else request.prompt_tokens
        rows.tokens[place] = request.prompt_tokens if is_first else 0
    return True


def _account(
    memory: OrcaMemory, rows: _Rows, live: np.ndarray, buddies: BuddyAllocator, seconds: float
) -> None:
    held = int(np.add.reduce(rows.computed[live] + rows.tokens[live]))
    to_come = int(np.add.reduce(rows.left[live])) - len(live)
    owned = buddies.num_slots - buddies.num_free
    memory.held += seconds * held
    memory.reserved += seconds * to_come
    memory.internal += seconds * (owned - held - to_come)
    memory.free += seconds * buddies.num_free
