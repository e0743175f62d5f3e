"""State of an engine in a process of its own, as it reports it, and a view of one moment of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.protocol.receipts.facts import EngineFacts

__all__ = [
    "CORE_STARTS",
    "FETCHING",
    "PLANNING",
    "EngineCapacity",
    "EngineState",
    "EngineStatus",
    "EngineView",
    "StartPhase",
    "ViewedGroup",
    "ViewedPrefix",
    "ViewedStep",
    "merge_views",
]

CORE_STARTS = "starting the engine core"
"""The phase of a start until the core itself names one."""

FETCHING = "fetching the checkpoint"
"""The phase of a start that fetches a missing checkpoint: it may take hours."""

PLANNING = "planning"


class EngineState(enum.StrEnum):
    """Only a READY engine takes requests."""

    STARTING = "starting"
    """The core is planning, loading or warming up; nothing has been served yet."""
    READY = "ready"
    STALLED = "stalled"
    """The core lives but says nothing, or makes no progress in a step; it may recover."""
    RESTARTING = "restarting"
    """The core died or was ended, and another one starts; open streams wait for it."""
    SLEEPING = "sleeping"
    """The core has given its memory back; it takes requests again when it is woken up."""
    DRAINING = "draining"
    """Open streams are served to their end; new requests are refused."""
    DEAD = "dead"
    """There is no core and none will come."""


@dataclass(frozen=True, slots=True)
class StartPhase:
    """One phase of a start ("planning", "loading", …). seconds: duration of the phase so far."""

    name: str
    seconds: float
    is_done: bool = True


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Capacity of a core that has started.

    max_model_len: tokens of one sequence, prompt and output. capacity_tokens: tokens of all
        sequences together.
    groups: window (None is full attention) and tokens per block, of each layer group. All blocks
        come from one pool.
    uses_priority: requests may name a priority. draws_tokens, num_classes: see `ModelSpec`.
    description: a sentence on the kernels that serve. device: device of the KV cache. facts:
        contents of receipts.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    capacity_tokens: int
    groups: tuple[tuple[int | None, int], ...]
    uses_priority: bool
    description: str = ""
    draws_tokens: bool = True
    num_classes: int = 0
    device: str = ""
    facts: EngineFacts = field(default_factory=EngineFacts)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """phases: phases of the latest start, in order; the last one is not done while it goes on.
    capacity: None until a core has been ready. restarts: number of cores that had to be replaced so
    far. message: reason why the engine is not ready, for people; empty when it is.
    """

    state: EngineState
    phases: tuple[StartPhase, ...] = ()
    capacity: EngineCapacity | None = None
    restarts: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class ViewedStep:
    """A step that has ended.

    number: from 1, since the core started. decode, prefill: tokens that sequences computed behind
    their prompts, and tokens of prompts. accepted, wasted: drafts that were right, and wrong. rows:
    sequences. evicted: blocks that it took from cached prefixes. ms: computing time; 0.0 if nobody
    measured it. age_s: seconds since it was planned.
    """

    number: int
    decode: int
    prefill: int
    accepted: int
    wasted: int
    rows: int
    evicted: int
    ms: float
    age_s: float


@dataclass(frozen=True, slots=True)
class ViewedGroup:
    """A request in the engine, or a pin that is no request any more.

    number: names it in the view. num_blocks: distinct blocks that it holds on the device. waits:
    reason in words; empty while it runs. num_tokens: known tokens of all sequences.
    """

    number: int
    request_id: str
    tenant: str
    num_blocks: int
    num_tokens: int
    waits: str = ""


@dataclass(frozen=True, slots=True)
class ViewedPrefix:
    """Blocks at the start of several sequences or pins.

    parent: place of the prefix that it continues, in the same list; -1 for none. num_tokens: from
    the start of the sequences. num_sequences, num_pins: owners. groups: numbers of some of them.
    """

    parent: int
    num_tokens: int
    num_sequences: int
    num_pins: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineView:
    """owners: runs of blocks as (number of the group that holds them, length); 0 for blocks that no
    group holds, and of several groups the lowest slot's. evicted: blocks that lost a cached prefix
    in the last second. steps: last ones of each core. num_hidden: groups that were left out, since
    there are so many.
    """

    owners: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()
    steps: tuple[tuple[ViewedStep, ...], ...] = ()
    groups: tuple[ViewedGroup, ...] = ()
    prefixes: tuple[ViewedPrefix, ...] = ()
    num_hidden: int = 0


def merge_views(views: Sequence[tuple[EngineView, int]]) -> EngineView:
    """Return the view of several cores, each given with its number of blocks: blocks follow one
    another, and numbers of groups are made distinct."""
    merged, blocks_before, count = EngineView(), 0, len(views)
    for core, (view, num_blocks) in enumerate(views):

        def numbered(number: int, core: int = core) -> int:
            return number * count + core if number else 0

        before = len(merged.prefixes)
        merged = EngineView(
            owners=(*merged.owners, *((numbered(each), length) for each, length in view.owners)),
            evicted=(*merged.evicted, *(blocks_before + block for block in view.evicted)),
            steps=(*merged.steps, *view.steps),
            groups=(
                *merged.groups,
                *(replace(group, number=numbered(group.number)) for group in view.groups),
            ),
            prefixes=(
                *merged.prefixes,
                *(
                    replace(
                        prefix,
                        parent=prefix.parent + before if prefix.parent >= 0 else -1,
                        groups=tuple(map(numbered, prefix.groups)),
                    )
                    for prefix in view.prefixes
                ),
            ),
            num_hidden=merged.num_hidden + view.num_hidden,
        )
        blocks_before += num_blocks
    return merged
