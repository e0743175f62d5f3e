"""The contract between the plan side and the data side: one `StepPlan` in, one `StepResult` out.

A plan is a difference. The data side keeps one row per live sequence in a slot, and applies a plan
in this order: leave → store → copy blocks → load → enter → extend → rewind → fork at the
start, append → table updates → deltas, drafts → forward → fork → sample and verify. All block
copies read their sources before any destination is written, and no block is both source and
destination of copies in one plan. Sampling may wait for `LateInput`: the masks of a step's rows
follow its plan, while the forward runs.

Work that may take longer than its step runs under a ticket, a number that is never used again. A
plan starts it; the result of that step or of any later one says that it is done or that it failed.
Until then its blocks belong to it, and no row reads them. While tickets are out and no row can go
on, plans that compute nothing are given, one at a time, and their results bring the news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.errors import QuireError, RequestError
from quire.protocol.pooling_params import Pooling
from quire.protocol.sampling_params import SamplingParams

__all__ = [
    "DRAFT_OF_MODEL",
    "EMPTY_INTS",
    "EnterRow",
    "ExtendPrompt",
    "ForkRow",
    "LateInput",
    "MaskArray",
    "FloatArray",
    "HOST_TIER",
    "NOTHING_DRAWN",
    "NO_TICKET",
    "IntArray",
    "MediaSpan",
    "PromptLogprobs",
    "REPORT_IT",
    "RowFailure",
    "RowTokens",
    "StepPlan",
    "StepResult",
    "TicketFailure",
    "TokenCandidates",
    "TokenLogprobs",
    "TopTokens",
    "no_ints",
]

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.uint32]
"""Bits over the vocabulary: token t is allowed if bit t % 32 of word t // 32 is set."""


def _empty_ints() -> IntArray:
    array = np.zeros(0, np.int32)
    array.flags.writeable = False
    return array


EMPTY_INTS: IntArray = _empty_ints()
EMPTY_FLOATS: FloatArray = np.zeros(0, np.float32)

HOST_TIER = 0
"""Host memory, among the tiers beyond the device that copies name."""

NO_TICKET = -1
"""In place of a ticket of copies that nobody waits for."""

DRAFT_OF_MODEL = -1
"""In place of a draft that the data side makes itself."""


_NOTHING: Mapping[int, Any] = MappingProxyType({})


def no_ints() -> IntArray:
    """The empty array, as a default of dataclass fields."""
    return EMPTY_INTS


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """`length` tokens of a prompt, from `position` on, that are rows of what the worker has under
    `handle`, from `first_row` on; the token ids there mean nothing. An image may have several
    spans, with text between them.

    positions: int32 [3 · length], of these tokens on three axes, one axis after the other, counted
        from the position at which the span begins. Text goes on after the largest of them. Empty:
        0, 1, 2, … on each axis, as text has them.
    is_whole: True if each of these tokens sees all of them. No step ends within the span.
    """

    position: int
    length: int
    handle: int
    positions: IntArray = field(default_factory=no_ints)
    first_row: int = 0
    is_whole: bool = False

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.position + self.length


@dataclass(frozen=True, slots=True)
class EnterRow:
    """Entry of a sequence into a slot, with everything that the data side must know of it.

    token_ids: int32 [num_prompt_tokens + output tokens so far]; a sequence that comes with output
        resumes as if it had been preempted.
    num_computed_tokens: number of them whose K/V are in the blocks already (prefix hit, or swapped
        in by this plan).
    block_tables: per layer group, int32 block ids by block index; an entry that lies wholly
        before the group's window is 0 and never read.
    seed: 64-bit seed of the request; a draw depends on (seed, sample_index, position, token id).
    stop_token_ids: banned while there are fewer than `params.min_tokens` output tokens.
    num_candidates: 0 if the row draws its next token; else the row gives this many of the most
        likely ones instead, and waits for the plan side to choose.
    checkpoint: holds the row's recurrent state after `num_computed_tokens`; None if the row starts
        from the initial state, or the model has none.
    adapter: index of the adapter that layers apply to the row's tokens.
    media: parts of the prompt that are embeddings, in order.
    waits_for_masks: the row waits for `LateInput` in every step in which it samples.
    pooling: None if the row draws tokens; else it gives one vector with the step that computes its
        last token, and nothing more. All but "last" enter with `num_computed_tokens` 0.
    second_start: index of the first token of the second text, if the prompt is a pair of texts.
    """

    slot: int
    token_ids: IntArray
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: tuple[IntArray, ...]
    params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int] = frozenset()
    num_candidates: int = 0
    checkpoint: int | None = None
    adapter: int = 0
    media: tuple[MediaSpan, ...] = ()
    waits_for_masks: bool = False
    pooling: Pooling | None = None
    second_start: int = 0


@dataclass(frozen=True, slots=True)
class ExtendPrompt:
    """The prompt of row `slot` goes on with `token_ids`, int32 [N]."""

    slot: int
    token_ids: IntArray


@dataclass(frozen=True, slots=True)
class ForkRow:
    """After this step's forward, `dst` becomes a copy of row `src` and draws its own next token
    from the logits of `src`, with its own random stream (`sample_index`)."""

    src: int
    dst: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Changes of one step, and with them its computation.

    Each row has a standing number of tokens that it computes in every step, set by `deltas` and
    kept until the next change; a step that changes nothing is an empty difference. A row whose
    computed count reaches its total count in this step samples its next token.

    Drafts are guesses at the tokens that follow the row's last one. The step computes them after
    the standing tokens and verifies them: it draws the token of each position in turn, and goes on
    while the draw equals the draft. A row with D drafts gets 1 to 1 + D tokens, the same ones as
    without drafts, and what it computed of the other drafts is dropped. A row that gives candidates
    verifies nothing: it gives those for its next token and for the token after each of its drafts,
    and has the drafts as its tokens then, until a plan rewinds those that were not chosen. The
    counts of the plan side are upper bounds until it has the result; the row knows its own, and no
    plan names a position.

    A row of a recurrent model has a state beside its blocks, the one after its computed tokens. A
    row that enters loads one before the step computes, a fork copies that of its source, and a step
    saves states when it has committed its rows. So a plan may replace a checkpoint that it loads,
    and the next plan may load what this one saves. What a failed row saves is worth nothing.

    stash_slot, stash_checkpoint: [number of states]: rows that leave, and the checkpoint that keeps
        the recurrent state of each, before anything else. No row enters with what it held before.
    leave: slots whose sequences are gone.
    store_src, store_tier, store_dst: [number of copies out]: device blocks, and the tier and place
        to which each is copied. store_ticket: the ticket of each, or NO_TICKET.
    copy_src, copy_dst: block ids, [number of copies].
    load_tier, load_src, load_dst: [number of copies in]: the tier and place of each, and the device
        block that it fills. load_ticket: the ticket of each; the copies of one start together.
    enter: rows that come in.
    extend: rows whose prompts go on.
    table_group, table_slot, table_index, table_block: [number of updates]: entry `table_index` of
        the block table of `table_slot` in layer group `table_group` is `table_block` from now on.
    rewind_slot, rewind_tokens: [number of rows]: the row forgets this many of its last tokens, and
        the results of them. The plan side names only rows whose results it has, all of them.
    start_fork_src, start_fork_dst: slots, [number of forks]: before the forward, row `dst` becomes
        a copy of row `src`, and computes nothing until a delta says so.
    append_slot, append_token: [number of tokens], row after row in the order of their positions,
        after these forks: the next tokens of the row are those that the plan side chose.
    delta_slot, delta_tokens: rows whose standing number of tokens changes.
    draft_slot, draft_token: [number of drafts], row after row in the order of their positions:
        drafts of rows that sample in this step. They hold for this step alone. DRAFT_OF_MODEL
        leaves all drafts of a row to the draft model; one that makes none verifies none.
    forks: rows that branch off after the forward.
    save_slot, save_checkpoint, save_drafts: [number of states]: rows that compute in this step, and
        the checkpoint that keeps the recurrent state of each after its certain tokens and so many
        of its drafts. If the row accepts fewer, the checkpoint keeps nothing.
    """

    step_id: int
    stash_slot: IntArray = field(default_factory=no_ints)
    stash_checkpoint: IntArray = field(default_factory=no_ints)
    leave: IntArray = field(default_factory=no_ints)
    store_src: IntArray = field(default_factory=no_ints)
    store_tier: IntArray = field(default_factory=no_ints)
    store_dst: IntArray = field(default_factory=no_ints)
    store_ticket: IntArray = field(default_factory=no_ints)
    copy_src: IntArray = field(default_factory=no_ints)
    copy_dst: IntArray = field(default_factory=no_ints)
    load_tier: IntArray = field(default_factory=no_ints)
    load_src: IntArray = field(default_factory=no_ints)
    load_dst: IntArray = field(default_factory=no_ints)
    load_ticket: IntArray = field(default_factory=no_ints)
    enter: tuple[EnterRow, ...] = ()
    extend: tuple[ExtendPrompt, ...] = ()
    rewind_slot: IntArray = field(default_factory=no_ints)
    rewind_tokens: IntArray = field(default_factory=no_ints)
    start_fork_src: IntArray = field(default_factory=no_ints)
    start_fork_dst: IntArray = field(default_factory=no_ints)
    append_slot: IntArray = field(default_factory=no_ints)
    append_token: IntArray = field(default_factory=no_ints)
    table_group: IntArray = field(default_factory=no_ints)
    table_slot: IntArray = field(default_factory=no_ints)
    table_index: IntArray = field(default_factory=no_ints)
    table_block: IntArray = field(default_factory=no_ints)
    delta_slot: IntArray = field(default_factory=no_ints)
    delta_tokens: IntArray = field(default_factory=no_ints)
    draft_slot: IntArray = field(default_factory=no_ints)
    draft_token: IntArray = field(default_factory=no_ints)
    forks: tuple[ForkRow, ...] = ()
    save_slot: IntArray = field(default_factory=no_ints)
    save_checkpoint: IntArray = field(default_factory=no_ints)
    save_drafts: IntArray = field(default_factory=no_ints)

    @property
    def started(self) -> tuple[int, ...]:
        """Tickets that start with this plan, in order."""
        if not (len(self.load_ticket) or len(self.store_ticket)):
            return ()
        tickets = {*self.load_ticket.tolist(), *self.store_ticket.tolist()}
        return tuple(sorted(tickets - {NO_TICKET}))

    @property
    def keeps_rows(self) -> bool:
        """True if nothing changes but entries of block tables of rows that go on."""
        return not (
            self.enter
            or self.extend
            or self.forks
            or len(self.stash_slot)
            or len(self.leave)
            or len(self.store_src)
            or len(self.copy_src)
            or len(self.load_src)
            or len(self.rewind_slot)
            or len(self.start_fork_src)
            or len(self.append_slot)
            or len(self.delta_slot)
            or len(self.draft_slot)
            or len(self.save_slot)
        )


@dataclass(frozen=True, slots=True)
class LateInput:
    """The only message that may follow a plan: the tokens that rows may draw. It holds for the rows
    that wait for masks and sample in that step, forked ones included. The step awaits it just
    before it samples.

    slots: int32 [R]. counts: int32 [R], positions of each row: one for its next token, and one for
        the token after each of its drafts. index: int32 [sum of counts], row after row: index in
        `masks` [M, ceil(V / 32)] at each position, -1 where any token is allowed. So equal masks
        are sent once.
    failed: rows that have no masks; their requests fail, nobody else's.
    """

    step_id: int
    slots: IntArray
    counts: IntArray
    index: IntArray
    masks: MaskArray
    failed: tuple[RowFailure, ...] = ()


class TopTokens(msgspec.Struct, frozen=True, array_like=True):
    """The most likely tokens at a position, best first, and their log-probabilities; [number
    asked]."""

    ids: IntArray
    logprobs: FloatArray


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, natural log, or what `logprobs_mode` asks for in their
    place. There is one for every token of a request with a receipt, so it is small.

    token_id, logprob, rank: the token at the position (rank 1 is the most likely).
    top: the most likely ones; None where none is asked for.
    log_mass: log of the probability, before filters (top-k, top-p, min-p), of all tokens that these
        leave in, under processed modes; None under others.
    """

    token_id: int
    logprob: float
    rank: int
    top: TopTokens | None = None
    log_mass: float | None = None

    @property
    def top_ids(self) -> IntArray:
        """Ids of the most likely tokens."""
        return EMPTY_INTS if self.top is None else self.top.ids

    @property
    def top_logprobs(self) -> FloatArray:
        """Log-probabilities of these."""
        return EMPTY_FLOATS if self.top is None else self.top.logprobs


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """Possible next tokens of a row whose next token the plan side chooses.

    token_ids: int32 [C], best first. scores: float64 [C]: the model's log-probability, at the
        request's temperature, plus the change of the logit by the request's edits; -inf is a ban.
    logprobs: one per candidate, for rows that asked; else empty.
    """

    token_ids: IntArray
    scores: npt.NDArray[np.float64]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start … start + len(entries) - 1`; start is at least 1,
    since nothing predicts the first token."""

    start: int
    entries: tuple[TokenLogprobs, ...]


REPORT_IT = "an equal one will most likely fail too, so report it together with the server's log"
"""Advice after an error of our own that depends on the request alone."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row could not be computed; the others were. `message` is meant for its user.
    is_request_fault: its request asks for what cannot be; else the engine or the model failed."""

    slot: int
    message: str
    is_request_fault: bool = False

    @classmethod
    def of(cls, slot: int, error: QuireError) -> RowFailure:
        """The failure of the row that `error` was raised for."""
        return cls(slot, str(error), isinstance(error, RequestError))


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens that rows have drawn: counts int64 [R] for slots int64 [R], in token_ids int32 row
    after row."""

    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    token_ids: IntArray

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Index of the first token of each row: [R]."""
        return np.cumsum(self.counts) - self.counts

    def of_row(self, index: int) -> list[int]:
        """Token ids of one row."""
        start = int(self.starts[index])
        return self.token_ids[start : start + int(self.counts[index])].tolist()

    def select(self, rows: npt.NDArray[np.bool_]) -> RowTokens:
        """The rows where `rows` [R] is true."""
        if rows.all():
            return self
        token_ids = self.token_ids[np.repeat(rows, self.counts)]
        return RowTokens(self.slots[rows], self.counts[rows], token_ids)


_NO_ROWS = np.zeros(0, np.int64)
NOTHING_DRAWN = RowTokens(_NO_ROWS, _NO_ROWS, EMPTY_INTS)


@dataclass(frozen=True, slots=True)
class TicketFailure:
    """Work under a ticket that failed; its other blocks are as if it were done.

    blocks: int32, destinations that were not filled: device blocks of loads, places of stores.
    """

    ticket: int
    blocks: IntArray
    message: str


def _nothing() -> Mapping[int, Any]:
    return _NOTHING


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step.

    slots: int32 [N], the rows that sampled, forked ones included. token_ids: int32 [sum of counts],
        the drawn tokens, row after row. counts: int32 [N], number of tokens of each row; None is
        one for each.
    candidates: for the next token, and for the token after each draft, indexed by the slot of rows
        that give candidates instead of drawing. Where there are fewer, the row could not compute
        the later drafts and does not have them.
    logprobs: one per token, indexed by slot, for rows that asked.
    prompt_logprobs: indexed by slot, for rows that asked: the prompt tokens that this step's chunk
        predicted (the token after each computed position, while that is a prompt token).
    vectors: float32 [E], indexed by slot, of the rows that pool and have computed their last token.
    failed: rows that produced nothing valid; their requests fail, nobody else's.
    done, failed_tickets: tickets that have ended, of this step and of earlier ones; each once.
    num_drafts: int32 [N], drafts that each of `slots` has verified; None is as many as the plan has
        for it. A model may make fewer than the plan asks for.
    seconds: computing time of the step; 0.0 if nobody measured it.
    """

    step_id: int
    slots: IntArray
    token_ids: IntArray
    candidates: Mapping[int, tuple[TokenCandidates, ...]] = field(default_factory=_nothing)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=_nothing)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=_nothing)
    failed: tuple[RowFailure, ...] = ()
    seconds: float = 0.0
    counts: IntArray | None = None
    done: tuple[int, ...] = ()
    failed_tickets: tuple[TicketFailure, ...] = ()
    vectors: Mapping[int, FloatArray] = field(default_factory=_nothing)
    num_drafts: IntArray | None = None

    @property
    def drawn(self) -> RowTokens:
        """The rows' drawn tokens, with the count of each."""
        slots = self.slots.astype(np.int64)
        if self.counts is None:
            return RowTokens(slots, np.ones(len(slots), np.int64), self.token_ids)
        return RowTokens(slots, self.counts.astype(np.int64), self.token_ids)
