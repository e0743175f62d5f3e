"""The scheduler's state of a request and its sequences while they wait or run."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.plan.grammar import Grammar, Matcher
from quire.plan.kv_cache import NO_EXTRAS, BlockExtras, SavedTables
from quire.plan.scheduler.beams.search import BeamSearch
from quire.plan.scheduler.readings.records import Record
from quire.plan.speculation import Acceptance, Drafter
from quire.protocol.request import EngineRequest, SequenceFinish
from quire.protocol.status import WaitReason
from quire.protocol.step import IntArray, TokenCandidates, TokenLogprobs

__all__ = ["BeamGroup", "GroupState", "Sequence", "SequenceGroup", "Unsent"]

MAX_UNJUDGED = 8
"""A watched sequence computes so many tokens ahead of its verdicts: quick ones cost no step."""


class GroupState(enum.Enum):
    WAITING = "waiting"  # has no slots; new or preempted
    BLOCKED = "blocked"  # waits for its tickets, with slots or without
    RUNNING = "running"  # every live sequence has a slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Unsent:
    """Tokens of a watched sequence that its client has not got.

    logprobs: one per token, if asked; else empty. num_told, num_judged: number of first tokens that
    a question has had, and that a verdict has answered. finish: end of the sequence if nobody
    objects. is_asked: whether a question waits for its verdict. is_end_told: whether one has said
    that the sequence ends.
    """

    handle: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    num_told: int = 0
    num_judged: int = 0
    finish: SequenceFinish | None = None
    is_asked: bool = False
    is_end_told: bool = False

    @property
    def must_wait(self) -> bool:
        """True if the sequence computes nothing before the next verdict."""
        has_ended = self.finish is not None
        return has_ended or len(self.token_ids) - self.num_judged >= MAX_UNJUDGED


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. With a slot its counts live in the `SequenceTable`; without one,
    `token_ids` holds all tokens whose values are known.

    names: hash chain of its full blocks with known tokens. num_pending: tokens that steps in flight
    will still bring to a sequence that was preempted after they were planned. swapped: its K/V in
    host memory, if they wait there or are being copied from there. matcher: state in the group's
    grammar, None until it is asked for masks. drafter, acceptance: source and success of drafts,
    None until some are asked for. forced_rests: number of steps for which no tokens without
    alternative are asked for. forced_patience: value of forced_rests after the next time that there
    are none. unsent: unsent tokens of a watched sequence, None until it has tokens. places: numbers
    of tokens at which its steps end so that its recurrent states are kept, and last all its tokens,
    chosen when it enters.
    """

    group: SequenceGroup
    sample_index: int
    token_ids: IntArray
    names: list[bytes]
    slot: int = -1
    num_pending: int = 0
    swapped: SavedTables | None = None
    matcher: Matcher | None = None
    drafter: Drafter | None = None
    acceptance: Acceptance | None = None
    forced_rests: int = 0
    forced_patience: int = 0
    unsent: Unsent | None = None
    places: list[int] = field(default_factory=list[int])

    @property
    def handle(self) -> int:
        return self.group.request.first_handle + self.sample_index

    @property
    def has_ended(self) -> bool:
        """True if all its tokens have come; a verdict may still replace some."""
        return self.unsent is not None and self.unsent.finish is not None


@dataclass(slots=True, eq=False)
class BeamGroup:
    """Beam search of a group whose sequences are the live beams, in the search's order.

    num_candidates: candidates that each row is asked for. wanted: ranks of the sequences found that
    a client waits for; their handles are the group's. candidates: candidates since the last token.
    """

    search: BeamSearch
    width: int
    num_candidates: int
    wanted: list[int]
    candidates: dict[Sequence, TokenCandidates] = field(
        default_factory=dict[Sequence, TokenCandidates]
    )


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request: scheduled, preempted and resumed together.

    number: order of arrival at this scheduler. unborn: sample indices that branch off when the
    prompt has been computed. root: parent name of the first block. max_total_tokens: most tokens of
    one sequence, prompt and output. record: notes on its way. key, account: values of the policy;
    see `Policy`. beams: search whose beams they are; None without one. blocked_on: tickets that
    must end before the group goes on. pins_hit: handles of the pinned prefixes that the request has
    used; its groups share it. extras: inputs beside tokens that change its K/V. message_ends:
    places in its prompt at which recurrent states are worth keeping. grammar: grammar of the
    outputs. adapter: the slot of its adapter, counted from 1; 0 for none. is_watched: whether
    verdicts decide what its client gets. is_guessed: whether its next tokens are guessed.
    input_ticket: ticket that blocks it while it has nothing to compute before its prompt goes on.
    verdict_ticket: ticket that blocks it while it has no slots and one of its sequences has all its
    tokens."""

    request: EngineRequest
    number: int
    root: bytes
    max_total_tokens: int
    record: Record
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    unborn: tuple[int, ...] = ()
    key: tuple[float, int] = (0.0, 0)
    account: int = 0
    state: GroupState = GroupState.WAITING
    was_admitted: bool = False
    was_fetched: bool = False
    is_watched: bool = False
    is_guessed: bool = False
    input_ticket: int | None = None
    verdict_ticket: int | None = None
    beams: BeamGroup | None = None
    blocked_on: set[int] = field(default_factory=set[int])
    pins_hit: set[int] = field(default_factory=set[int])
    extras: BlockExtras = NO_EXTRAS
    message_ends: tuple[int, ...] = ()
    grammar: Grammar | None = None
    adapter: int = 0

    def stop_of(self, start: int, end: int) -> int:
        """Return where a step ends that has computed `start` tokens of a sequence and could go to
        `end`: not within media that are computed whole."""
        for media in self.request.media:
            span = media.span
            if span.is_whole and span.position < end < span.end:
                return max(span.position, start)
        return end

    @property
    def whole_end(self) -> int:
        """Number of tokens up to the end of the last media that are computed whole; 0 without."""
        return max((each.span.end for each in self.request.media if each.span.is_whole), default=0)

    @property
    def is_spare(self) -> bool:
        """True if it is computed with what others leave."""
        return self.request.scheduling.is_spare

    @property
    def has_slots(self) -> bool:
        return any(sequence.slot >= 0 for sequence in self.sequences)

    @property
    def blocked_by(self) -> WaitReason:
        """The reason why it is blocked."""
        if self.request.grammar is not None and self.grammar is None:
            return WaitReason.GRAMMAR
        if self.request.adapter is not None and not self.adapter:
            return WaitReason.ADAPTER
        if self.input_ticket in self.blocked_on:
            return WaitReason.INPUT
        if self.verdict_ticket in self.blocked_on:
            return WaitReason.VERDICT
        return WaitReason.COPIES

    @property
    def draws(self) -> bool:
        """True if the data side draws the group's next tokens."""
        return self.beams is None and self.request.pooling is None

    @property
    def awaits_verdict(self) -> bool:
        """True if a sequence of the group ends unless a verdict objects."""
        return self.is_watched and any(sequence.has_ended for sequence in self.sequences)

    @property
    def is_coming_in(self) -> bool:
        """True if its K/V are being copied from the host: it has slots and blocks, but the data
        side has no rows for them yet."""
        return any(s.slot >= 0 and s.swapped is not None for s in self.sequences)

    @property
    def num_slots(self) -> int:
        """Slots that the group takes, those of sequences still to branch off included."""
        if self.beams is not None:
            return self.beams.width
        return len(self.sequences) + len(self.unborn)

    @property
    def may_branch(self) -> bool:
        """True if sequences may still branch off, in slots that are kept for them."""
        return bool(self.unborn) or self.beams is not None

    @property
    def live_samples(self) -> tuple[int, ...]:
        """Indices of the samples whose ends have not been reported."""
        if self.beams is not None:
            return tuple(self.beams.wanted)
        return (*(sequence.sample_index for sequence in self.sequences), *self.unborn)
