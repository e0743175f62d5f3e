"""Facts about the way of one request through the scheduler: waits, steps, preemptions, cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "CacheFacts",
    "LoadOutcome",
    "OtherRequest",
    "Preemption",
    "PreemptionCause",
    "RequestFacts",
    "WaitReason",
]


class WaitReason(enum.Enum):
    """Reasons why a request does not compute, each with a name and in words."""

    PLACES = "places", "all places of the batch are taken (max_num_seqs)"
    TOKENS = "tokens", "the tokens of a step are used up (max_num_batched_tokens)"
    BLOCKS = "blocks", "too few K/V blocks are free"
    SPARE = "spare", "others come before work on spare capacity"
    HELD = "held", "no request is admitted while the engine waits for the others to end"
    PENDING = "pending", "the first in the queue has tokens on their way"
    STATE = "state", "a step under way computes the prefix that the first in the queue starts with"
    STEP = "step", "the next step may admit it"
    GRAMMAR = "grammar", "its grammar is being compiled"
    ADAPTER = "adapter", "its adapter is being loaded, or all slots of adapters are taken"
    INPUT = "input", "the rest of its prompt is to come"
    VERDICT = "verdict", "an output hook has yet to answer"
    COPIES = "copies", "its K/V are being copied to the device"

    def __new__(cls, value: str, words: str) -> WaitReason:
        found = object.__new__(cls)
        found._value_ = value
        found.words = words
        return found

    words: str


class PreemptionCause(enum.StrEnum):
    """Reasons why a request lost its blocks before its end."""

    BLOCKS = "blocks"
    """Another request needed blocks to grow."""
    SPARE = "spare"
    """It ran on spare capacity, and others came."""
    IDLE = "idle"
    """It waited for more of its prompt, and others needed its place or its blocks."""
    MEMORY = "memory"
    """The device lost all K/V: the engine slept, got new weights, or lost a step."""
    RESET = "reset"
    """The prefix cache was reset together with the requests that run."""
    RESULT = "result"
    """Tokens that had been computed could not be kept."""


class LoadOutcome(enum.StrEnum):
    """Outcomes of K/V that a tier beyond the device held for a request."""

    NONE = ""
    """No tier held more than the device, or all of it came."""
    DECLINED = "declined"
    """Computing was faster than loading."""
    LATE = "late"
    """The load took too long."""
    LOST = "lost"
    """The load failed, or some of its blocks did."""


@dataclass(frozen=True, slots=True)
class OtherRequest:
    """A request that another one met. tenant: name of its key."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Preemption:
    """One loss of all blocks. by: the request for which it happened, if it was one. num_computed:
    tokens whose K/V were there. num_again: tokens of these that were computed again after it.
    num_swapped: tokens that waited in host memory. seconds: time until it ran again. The last two
    are None while it waits."""

    cause: PreemptionCause
    by: OtherRequest | None
    num_computed: int
    num_swapped: int = 0
    num_again: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The cached prefix of a request, when it was admitted.

    is_on: whether prefixes are cached. reads: whether the request may start from one; one that asks
    for all of its prompt may not. num_prompt, num_cached: tokens, of the first sequence.
    is_evicted: whether the block after the cached ones was in the cache and was given to others.
    load: outcome of blocks beyond the device. needs_states: whether it may only start where a
    recurrent state was kept. num_resets: number of times that the whole cache was emptied before.
    weights_version: number of times that weights were replaced before.
    """

    is_on: bool
    reads: bool
    block_size: int
    num_prompt: int
    num_cached: int
    is_evicted: bool = False
    needs_states: bool = False
    load: LoadOutcome = LoadOutcome.NONE
    num_resets: int = 0
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One prompt of a request in a core, up to now or to its end.

    core: number of the core, among replicas. state: "waiting", "blocked", "running" or "finished".
    age_s: seconds since it arrived. waits: seconds before its first step, by reason. behind:
    requests that held the most blocks when it began to wait. num_running, num_waiting: others at
    that time. num_chunks: steps that computed its prompt at first. num_chunk_tokens: tokens of
    these. num_steps: steps that went on behind the prompt. chunk_rows, step_rows: fewest and most
    other rows that decoded beside its chunks, and that computed beside its steps; None before the
    first. preemptions: the first ones, num_preemptions: all. cache: None before it was admitted.
    """

    request_id: str
    tenant: str
    state: str
    age_s: float
    waits: dict[str, float]
    behind: tuple[OtherRequest, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    chunk_rows: tuple[int, int] | None = None
    num_steps: int = 0
    step_rows: tuple[int, int] | None = None
    preemptions: tuple[Preemption, ...] = ()
    num_preemptions: int = 0
    cache: CacheFacts | None = None
    core: int = 0
