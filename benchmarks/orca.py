"""The baseline of the PagedAttention paper: Orca (Oracle), as its section 6.1 defines it.

Iteration-level scheduling like ours, but each request gets one contiguous piece of KV memory when
it starts, for its prompt and all of its output, whose length an oracle knows; pieces come from a
buddy allocator (Knowlton 1965), so their sizes are powers of two. Nothing is shared, nothing is
preempted, and a prompt is computed whole in one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cost_model import StepCost
from simulation import Served

from quire.protocol import EngineRequest

__all__ = ["BuddyAllocator", "serve_orca"]


class BuddyAllocator:
    """Pieces of 2^order slots out of `num_slots`, which need not be a power of two itself."""

    def __init__(self, num_slots: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """(first slot, order) of the smallest piece that holds so many, or None."""
        order = (num_slots - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for half in reversed(range(order, found)):
            self._free[half].add(start + (1 << half))
        return start, order

    def release(self, start: int, order: int) -> None:
        """Give a piece back, joined with its free buddies."""
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    @property
    def num_free(self) -> int:
        return sum(len(starts) << order for order, starts in enumerate(self._free))


@dataclass(slots=True)
class _Running:
    handle: int
    piece: tuple[int, int]
    num_computed: int
    num_tokens: int
    num_left: int


def serve_orca(
    requests: Sequence[EngineRequest],
    cost: StepCost,
    *,
    num_slots: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Served:
    """All requests (of one sequence each, in order of arrival), on a clock that starts at 0."""
    waiting, memory = deque(requests), BuddyAllocator(num_slots)
    running: list[_Running] = []
    first: dict[int, float] = {}
    finished: dict[int, float] = {}
    now = busy_s = running_s = 0.0
    while waiting or running:
        budget = max_num_batched_tokens - len(running)
        while waiting and waiting[0].arrival_time <= now and len(running) < max_num_seqs:
            entered = _enter(waiting[0], memory, budget)
            if entered is None:
                break
            budget -= entered.num_tokens
            running.append(entered)
            waiting.popleft()
        if not running:
            now = max(now, waiting[0].arrival_time)
            continue
        seconds = cost.seconds(
            np.array([row.num_computed for row in running], np.int64),
            np.array([row.num_tokens for row in running], np.int64),
        )
        now, busy_s, running_s = now + seconds, busy_s + seconds, running_s + seconds * len(running)
        for row in running:
            first.setdefault(row.handle, now)
            row.num_computed += row.num_tokens
            row.num_tokens = 1
            row.num_left -= 1
            if not row.num_left:
                finished[row.handle] = now
                memory.release(*row.piece)
        running = [row for row in running if row.num_left]
    handles = [request.first_handle for request in requests]
    return Served(
        first_token_s=[first[handle] for handle in handles],
        finished_s=[finished[handle] for handle in handles],
        plan_us=[],
        mean_running=running_s / busy_s,
        num_preempted=0,
    )


def _enter(request: EngineRequest, memory: BuddyAllocator, budget: int) -> _Running | None:
    """A row with its memory, or None if there is no room for it in the step or the memory."""
    num_prompt, num_output = len(request.prompt_token_ids), request.params.max_tokens
    if num_prompt > budget:
        return None
    piece = memory.allocate(num_prompt + num_output)
    if piece is None:
        return None
    return _Running(request.first_handle, piece, 0, num_prompt, num_output)
