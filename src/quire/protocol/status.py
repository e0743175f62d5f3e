"""State of an engine in a process of its own, as it reports it; a view of one moment of it; facts
about the way of one request through its scheduler."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = [
    "CORE_STARTS",
    "FETCHING",
    "PLANNING",
    "CacheFacts",
    "EngineCapacity",
    "EngineFacts",
    "EngineState",
    "EngineStatus",
    "EngineView",
    "LoadOutcome",
    "OtherRequest",
    "Preemption",
    "PreemptionCause",
    "PromptChunk",
    "RequestFacts",
    "StartPhase",
    "ViewedGroup",
    "ViewedPrefix",
    "ViewedStep",
    "WaitReason",
    "merge_views",
]

CORE_STARTS = "starting the engine core"
"""The phase of a start until the core itself names one."""

FETCHING = "fetching the checkpoint"
"""The phase of a start that fetches a missing checkpoint: it may take hours."""

PLANNING = "planning"

Setting = str | int | bool | None


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
class EngineFacts:
    """Everything that decides the bits of an engine's answers, as it is known at its start.

    program: version, kernels and settings, by name. config: digest of the model's config. files:
    stamp of the weight files as they were loaded (`stamp_files`). unstable: reason why other
    answers beside an answer may change its bits; empty if they never do.
    """

    program: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    config: str = ""
    files: str = ""
    unstable: str = "its bits were not looked at"


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Capacity of a core that has started.

    max_model_len: tokens of one sequence, prompt and output. capacity_tokens: tokens of all
        sequences together.
    groups: window (None is full attention) and tokens per block, of each layer group. All blocks
        come from one pool.
    uses_priority: requests may name a priority. draws_tokens, num_classes: see `ModelSpec`.
    description: a sentence on the kernels that serve. device: device of the KV cache. kv_store:
        folder of the store of K/V on disk that it or another replica writes; empty if there is
        none. facts: contents of receipts. num_ranks: processes that hold a part of the model each.
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
    kv_store: str = ""
    facts: EngineFacts = field(default_factory=EngineFacts)
    num_ranks: int = 1


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
    there are so many. took_s: time of the core that took longest for it.
    """

    owners: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()
    steps: tuple[tuple[ViewedStep, ...], ...] = ()
    groups: tuple[ViewedGroup, ...] = ()
    prefixes: tuple[ViewedPrefix, ...] = ()
    num_hidden: int = 0
    took_s: float = 0.0


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
            took_s=max(merged.took_s, view.took_s),
        )
        blocks_before += num_blocks
    return merged


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
    num_swapped: tokens that waited in host memory. at_s: time of the loss, in seconds since the
    request arrived. seconds: time until it ran again. num_again and seconds are None while it
    waits."""

    cause: PreemptionCause
    by: OtherRequest | None
    num_computed: int
    num_swapped: int = 0
    num_again: int | None = None
    seconds: float | None = None
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A step that computed a part of a prompt. at_s: time of its plan, in seconds since the request
    arrived. num_tokens: tokens of the prompt. num_rows: rows that decoded beside it."""

    at_s: float
    num_tokens: int
    num_rows: int


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
    these. chunks: the first ones. num_steps: steps that went on behind the prompt. chunk_rows,
    step_rows: fewest and most other rows that decoded beside its chunks, and that computed beside
    its steps; None before the first. preemptions: the first ones, num_preemptions: all. cache: None
    before it was admitted.
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
    chunks: tuple[PromptChunk, ...] = ()
    chunk_rows: tuple[int, int] | None = None
    num_steps: int = 0
    step_rows: tuple[int, int] | None = None
    preemptions: tuple[Preemption, ...] = ()
    num_preemptions: int = 0
    cache: CacheFacts | None = None
    core: int = 0
