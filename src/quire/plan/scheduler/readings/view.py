"""One moment of a scheduler, for people: owners of blocks, reasons to wait, shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.base.telemetry.flight.record import FlightRecorder
from quire.plan.scheduler.sequence import GroupState, SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.status import EngineView, ViewedGroup, ViewedPrefix, ViewedStep, WaitReason

__all__ = ["JUST_NOW_S", "shared_prefixes", "view_of", "viewed_steps"]

MAX_WAITING = 100
MAX_PREFIXES = 64
MAX_NAMED = 8
"""Owners of a prefix that are named."""

JUST_NOW_S = 1.0
MAX_STEPS = 256
"""Steps that a view has at most."""

PIN = -1
"""Stands for the group of a pin among the owners of a prefix."""


def view_of(
    state: SchedulerState, steps: tuple[ViewedStep, ...], steps_s: float, shortage: WaitReason
) -> EngineView:
    """Return the moment. steps: from the log, those of `JUST_NOW_S` at least. steps_s: age of the
    oldest that the view has. shortage: reason why the last step admitted no more groups."""
    slots = [sequence for sequence in state.table.sequences if sequence is not None]
    holders: dict[SequenceGroup, set[int]] = {}
    owner = np.zeros(state.kv.pool.num_blocks, np.int64)
    tables: list[tuple[Sequence[int], int]] = []
    for sequence in reversed(slots):
        blocks = state.kv.held_blocks(sequence.slot)
        held = [block for each in blocks for block in each]
        owner[held] = _number(sequence.group)
        holders.setdefault(sequence.group, set()).update(held)
        if state.kv.holds_start(sequence.slot):
            tables.append((blocks[0], _number(sequence.group)))
    tables += [(blocks, PIN) for blocks in state.pins.tables()]
    waiting = _waiting(state)
    shown = [*holders, *islice(waiting, MAX_WAITING)]
    evicted = sum(step.evicted for step in steps if step.age_s <= JUST_NOW_S)
    return EngineView(
        owners=_runs(owner),
        evicted=state.kv.pool.last_evicted(evicted),
        steps=(tuple(step for step in steps if step.age_s <= steps_s),),
        groups=tuple(_viewed(group, holders, state, shortage) for group in dict.fromkeys(shown)),
        prefixes=shared_prefixes(tables, state.kv.layout.groups[0].tokens_per_block),
        num_hidden=max(len(waiting) - MAX_WAITING, 0),
    )


def viewed_steps(flight: FlightRecorder, now: float, max_age_s: float) -> tuple[ViewedStep, ...]:
    """Return the last steps that have a result and were planned so lately, oldest first."""
    return tuple(
        ViewedStep(
            number=planned.number,
            decode=planned.decode,
            prefill=planned.prefill,
            accepted=ended.accepted,
            wasted=planned.drafts - ended.accepted,
            rows=planned.rows,
            evicted=planned.evicted,
            ms=ended.compute_us / 1000,
            age_s=round(now - planned.begin / 1e9, 3),
        )
        for step in flight.recent(int((now - max_age_s) * 1e9), MAX_STEPS)
        for planned, ended in ((step.planned, step.ended),)
        if step.has_result
    )


def _number(group: SequenceGroup) -> int:
    return group.number + 1  # 0 stands for nobody


def _waiting(state: SchedulerState) -> list[SequenceGroup]:
    """Return groups that wait, without those that hold slots, by arrival."""
    blocked = [group for group in state.roster.blocked if not group.has_slots]
    return sorted([*state.waiting, *blocked], key=lambda group: group.number)


def _runs(owner: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[tuple[int, int], ...]:
    """Return runs of equal values, as (value, length)."""
    starts = np.flatnonzero(np.diff(owner, prepend=owner[:1] - 1))
    lengths = np.diff(starts, append=len(owner))
    return tuple(zip(owner[starts].tolist(), lengths.tolist(), strict=True))


def _viewed(
    group: SequenceGroup,
    holders: dict[SequenceGroup, set[int]],
    state: SchedulerState,
    shortage: WaitReason,
) -> ViewedGroup:
    table = state.table
    return ViewedGroup(
        number=_number(group),
        request_id=group.request.request_id,
        tenant=group.request.scheduling.tenant,
        num_blocks=len(holders.get(group, ())),
        num_tokens=sum(
            int(table.num_known[each.slot]) if each.slot >= 0 else len(each.token_ids)
            for each in group.sequences
        ),
        waits="" if group.state is GroupState.RUNNING else _reason(group, shortage),
    )


def _reason(group: SequenceGroup, shortage: WaitReason) -> str:
    """Return in words why a group does not compute."""
    reason = shortage if group.state is GroupState.WAITING else group.blocked_by
    was_preempted = group.was_admitted and not group.has_slots
    says_so = group.state is GroupState.WAITING or reason is WaitReason.COPIES
    return ("preempted; " if was_preempted and says_so else "") + reason.words


@dataclass(frozen=True, slots=True)
class _Range:
    """Tables `start … end - 1` of a sorted list, equal up to `depth` blocks. parent: place of the
    prefix that they have so far."""

    start: int
    end: int
    depth: int
    parent: int


def shared_prefixes(
    tables: Sequence[tuple[Sequence[int], int]], tokens_per_block: int
) -> tuple[ViewedPrefix, ...]:
    """Return the tree of block runs that several tables begin with, parents first; at most
    `MAX_PREFIXES`. tables: blocks in the order of their tokens, and the number of the group, or
    `PIN`. A pin's run is shown though nothing shares it."""
    ordered = sorted(((list(blocks), owner) for blocks, owner in tables), key=lambda each: each[0])
    found: list[ViewedPrefix] = []
    todo = [_Range(0, len(ordered), 0, -1)]
    while todo and len(found) < MAX_PREFIXES:
        at = todo.pop()
        for start, end in reversed(list(_split(ordered, at))):
            first, last = ordered[start][0], ordered[end - 1][0]
            owners = [owner for _, owner in ordered[start:end]]
            if len(owners) < 2 and PIN not in owners:
                continue
            depth = _common(first, last)
            numbers = dict.fromkeys(owner for owner in owners if owner != PIN)
            found.append(
                ViewedPrefix(
                    parent=at.parent,
                    num_tokens=depth * tokens_per_block,
                    num_sequences=sum(owner != PIN for owner in owners),
                    num_pins=owners.count(PIN),
                    groups=tuple(islice(numbers, MAX_NAMED)),
                )
            )
            todo.append(_Range(start, end, depth, len(found) - 1))
    return tuple(found[:MAX_PREFIXES])


def _split(ordered: Sequence[tuple[list[int], int]], at: _Range) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range whose tables go on with the same block."""
    start = at.start
    while start < at.end and len(ordered[start][0]) <= at.depth:
        start += 1  # these end here
    while start < at.end:
        block, end = ordered[start][0][at.depth], start + 1
        while end < at.end and ordered[end][0][at.depth] == block:
            end += 1
        yield start, end
        start = end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
