"""Tokens that clients have not received yet, because a verdict decides about them first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.plan.scheduler.outputs import OutputCollector
from quire.plan.scheduler.sequence import Sequence, Unsent
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.request import EngineRequest, SequenceFinish
from quire.protocol.step import IntArray, TokenLogprobs, no_ints

__all__ = ["Question", "UnsentTokens", "Verdict"]


@dataclass(frozen=True, slots=True)
class Question:
    """Question about the unsent tokens of a sequence, int32 [N]. num_known: number of first tokens
    that an earlier question had, or that a verdict has written. is_last: the sequence ends with
    these tokens, unless the verdict replaces some."""

    handle: int
    request: EngineRequest
    sample_index: int
    token_ids: IntArray
    num_known: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to a question. num_passed: number of the question's unsent tokens that may be sent.
    num_kept: number of tokens that stay, None: all; the tokens `instead` follow them. end: reason
    why the sequence ends after the tokens that stay. failure: reason why its request fails."""

    handle: int
    num_passed: int = 0
    num_kept: int | None = None
    instead: IntArray = field(default_factory=no_ints)
    end: str | None = None
    failure: str | None = None


class UnsentTokens:
    """Keeps the unsent tokens of watched sequences, and asks about them, one question per sequence
    at a time. A sequence waits while too many of its tokens have no verdict, or when all its tokens
    have come."""

    def __init__(self, table: SequenceTable, outputs: OutputCollector) -> None:
        self._table = table
        self._outputs = outputs
        self._sequences: dict[int, Sequence] = {}  # with unsent tokens, by handle
        self._news: dict[int, Sequence] = {}  # with something to ask, by handle
        self._forgotten: list[int] = []
        self._num_asked = 0

    @property
    def has_open_questions(self) -> bool:
        """True if verdicts are to come."""
        return self._num_asked > 0 or bool(self._news)

    def append(self, sequence: Sequence, token: int) -> None:
        """Take the next token of a watched sequence."""
        self._of(sequence).token_ids.append(token)
        self._changed(sequence)

    def append_logprobs(self, sequence: Sequence, entry: TokenLogprobs) -> None:
        """Take what belongs to the token that is appended next."""
        self._of(sequence).logprobs.append(entry)

    def end(self, sequence: Sequence, finish: SequenceFinish) -> None:
        """All tokens have come; the sequence ends so if the verdict lets it."""
        self._of(sequence).finish = finish
        self._changed(sequence)

    def find(self, handle: int) -> Sequence | None:
        """The sequence that was asked about, None if it has ended meanwhile."""
        return self._sequences.get(handle)

    def answered(self, unsent: Unsent, num_passed: int) -> None:
        """A verdict has come: these tokens are judged, and the first `num_passed` are sent."""
        unsent.is_asked = False
        self._num_asked -= 1
        unsent.num_judged = unsent.num_told
        self._send(unsent, num_passed)

    def _send(self, unsent: Unsent, count: int) -> None:
        handle, tokens = unsent.handle, unsent.token_ids[:count]
        for entry in unsent.logprobs[:count]:
            self._outputs.logprobs(handle, entry)
        handles = np.full(len(tokens), handle, np.int64)
        self._outputs.tokens(handles, np.array(tokens, np.int32))
        del unsent.token_ids[:count], unsent.logprobs[:count]
        unsent.num_told -= count
        unsent.num_judged -= count

    def cut(self, unsent: Unsent, num_kept: int) -> int:
        """Drop the tokens after the first `num_kept`; return how many were dropped. The sequence
        does not end so."""
        num_gone = len(unsent.token_ids) - num_kept
        del unsent.token_ids[num_kept:], unsent.logprobs[num_kept:]
        unsent.num_told = min(unsent.num_told, num_kept)
        unsent.num_judged = min(unsent.num_judged, num_kept)
        unsent.finish, unsent.is_end_told = None, False
        return num_gone

    def written(self, sequence: Sequence) -> None:
        """Note that the last tokens come from a verdict, so that no question is asked about them
        alone."""
        unsent = self._of(sequence)
        unsent.num_told = unsent.num_judged = len(unsent.token_ids)
        self._changed(sequence)

    def went_on(self, sequence: Sequence) -> None:
        """A verdict has changed the counts of the sequence."""
        self._changed(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; its unsent tokens are never sent."""
        unsent = sequence.unsent
        if unsent is None:
            return
        self._num_asked -= unsent.is_asked
        self._sequences.pop(sequence.handle, None)
        self._news.pop(sequence.handle, None)
        self._forgotten.append(sequence.handle)
        sequence.unsent = None

    def questions(self) -> list[Question]:
        """Return the questions to ask now, each once."""
        found: list[Question] = []
        for handle, sequence in self._news.items():
            unsent = self._of(sequence)
            found.append(
                Question(
                    handle,
                    sequence.group.request,
                    sequence.sample_index,
                    np.array(unsent.token_ids, np.int32),
                    unsent.num_told,
                    unsent.finish is not None,
                )
            )
            unsent.num_told = len(unsent.token_ids)
            unsent.is_asked, unsent.is_end_told = True, unsent.finish is not None
            self._num_asked += 1
        self._news.clear()
        return found

    def forgotten(self) -> list[int]:
        """Handles of watched sequences that have ended. Once."""
        found, self._forgotten = self._forgotten, []
        return found

    def _of(self, sequence: Sequence) -> Unsent:
        if sequence.unsent is None:
            sequence.unsent = Unsent(sequence.handle)
            self._sequences[sequence.handle] = sequence
        return sequence.unsent

    def _changed(self, sequence: Sequence) -> None:
        unsent = self._of(sequence)
        has_news = len(unsent.token_ids) > unsent.num_told
        has_news |= unsent.finish is not None and not unsent.is_end_told
        if has_news and not unsent.is_asked:
            self._news[sequence.handle] = sequence
        else:
            self._news.pop(sequence.handle, None)
        if sequence.slot >= 0:
            self._table.is_paused[sequence.slot] = unsent.must_wait
