"""What the scheduler knows of a request and its sequences while they wait or run."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.kv_cache import SavedTables
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray

__all__ = ["GroupState", "Sequence", "SequenceGroup"]


class GroupState(enum.Enum):
    WAITING = "waiting"  # has no slots; new or preempted
    PARKED = "parked"  # has no slots, and waits for more of its prompt
    RUNNING = "running"  # every live sequence has a slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. With a slot its counts live in the `SequenceTable`; without one,
    `token_ids` holds all tokens whose values are known.

    names: hash chain of its full blocks with known tokens. num_pending: tokens that steps in
    flight will still bring to a sequence that was preempted after they were planned. swapped: its
    K/V in host memory, if that is where they wait.
    """

    group: SequenceGroup
    sample_index: int
    token_ids: IntArray
    names: list[bytes]
    slot: int = -1
    num_pending: int = 0
    swapped: SavedTables | None = None

    @property
    def handle(self) -> int:
        return self.group.request.first_handle + self.sample_index


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: scheduled, preempted and resumed together.

    number: order of arrival at this scheduler. unborn: sample indices that branch off when the
    prompt has been computed. root: parent name of the first block. max_total_tokens: prompt and
    output of one sequence at most. key: from the policy.
    """

    request: EngineRequest
    number: int
    root: bytes
    max_total_tokens: int
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    unborn: tuple[int, ...] = ()
    key: tuple[float, int] = (0.0, 0)
    state: GroupState = GroupState.WAITING
    was_admitted: bool = False

    @property
    def num_slots(self) -> int:
        """Slots that the group takes, those of samples still to branch off included."""
        return len(self.sequences) + len(self.unborn)
