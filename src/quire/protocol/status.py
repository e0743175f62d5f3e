"""State of an engine in a process of its own, as it reports it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "CORE_STARTS",
    "FETCHING",
    "PLANNING",
    "EngineCapacity",
    "EngineState",
    "EngineStatus",
    "StartPhase",
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
    description: a sentence on the kernels that serve. device: device of the KV cache.
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
