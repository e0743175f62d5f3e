"""The rules of beam search, without rows and blocks: the beams that go on, and the finished ones.

They are those of `transformers` (`generate(num_beams=…)`), and so are the scores. Of all
continuations of all beams, in the order of their summed log-probabilities, those that end are kept
if they are among the first `width`, and the first `width` that do not end go on. A row offers its
best `width` + number of stop tokens continuations: at most so many of its own stand before the last
one that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np

from quire.protocol.beam_search import BeamRules
from quire.protocol.request import FinishReason
from quire.protocol.step import IntArray, TokenCandidates, TokenLogprobs

__all__ = ["Beam", "BeamSearch", "Continuation", "FoundSequence"]


@dataclass(frozen=True, slots=True)
class Trail:
    """Log-probabilities of a beam's tokens, last one first; beams that branched off share them."""

    last: TokenLogprobs
    before: Trail | None

    def unwind(self) -> tuple[TokenLogprobs, ...]:
        """In the order of the tokens."""
        entries: list[TokenLogprobs] = []
        here: Trail | None = self
        while here is not None:
            entries.append(here.last)
            here = here.before
        return tuple(reversed(entries))


@dataclass(frozen=True, slots=True)
class Beam:
    """cum_logprob: sum over the output tokens. trail: kept only if log-probabilities
    were asked for."""

    cum_logprob: float = 0.0
    trail: Trail | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continue beam number `parent` by `token_id`, which makes `beam`."""

    parent: int
    token_id: int
    beam: Beam


@dataclass(frozen=True, slots=True)
class FoundSequence:
    """output: its tokens after the prompt. reason: why it ended."""

    output: IntArray
    beam: Beam
    score: float
    reason: FinishReason

    @property
    def stop_token_id(self) -> int | None:
        """Token that ended it; None if it reached its length."""
        return int(self.output[-1]) if self.reason is FinishReason.STOP else None


class EndRule(Protocol):
    """`EngineRequest.ending` of the request that searches."""

    def __call__(self, output_ids: IntArray, *, has_room: bool) -> FinishReason | None: ...


class BeamSearch:
    """One search. max_tokens: length limit of the output."""

    def __init__(self, rules: BeamRules, max_tokens: int, ending: EndRule) -> None:
        self._rules = rules
        self._max_tokens = max_tokens
        self._ending = ending
        self.live = [Beam()]
        self.found: list[FoundSequence] = []
        self.is_done = False

    def advance(
        self, candidates: Sequence[TokenCandidates], outputs: Sequence[IntArray]
    ) -> list[Continuation]:
        """Advance by one token. Return the beams that are live now, best first; none once
        `is_done`. candidates: candidates of each live beam, in their order. outputs: the beams'
        tokens after the prompt."""
        width, num_output = self._rules.width, len(outputs[0]) + 1
        going_on: list[Continuation] = []
        for rank, step in enumerate(self._in_order(candidates)):
            output = np.append(outputs[step.parent], np.int32(step.token_id))
            reason = self._ending(output, has_room=num_output < self._max_tokens)
            if reason is None:
                going_on.append(step)
            elif rank < width:
                score = self._rules.score(step.beam.cum_logprob, num_output)
                self.found.append(FoundSequence(output, step.beam, score, reason))
            if rank >= width - 1 and (len(going_on) == width or num_output == self._max_tokens):
                break
        self.found = sorted(self.found, key=attrgetter("score"), reverse=True)[:width]
        self.live = [step.beam for step in going_on]
        self.is_done = not going_on or self._is_settled(num_output)
        return [] if self.is_done else going_on

    def _in_order(self, candidates: Sequence[TokenCandidates]) -> Iterator[Continuation]:
        """Return the continuations that can still win, best first; among equal ones, that of the
        better beam."""
        counts = [len(c.token_ids) for c in candidates]
        parents = np.repeat(np.arange(len(candidates)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        before = np.array([beam.cum_logprob for beam in self.live])
        totals = before[parents] + np.concatenate([c.scores for c in candidates])
        order = np.argsort(-totals, kind="stable")
        order = order[np.isfinite(totals[order])]
        for i in order.tolist():
            parent = int(parents[i])
            yield self._continue(parent, candidates[parent], int(places[i]), float(totals[i]))

    def _continue(
        self, parent: int, candidates: TokenCandidates, place: int, total: float
    ) -> Continuation:
        trail = None
        if candidates.logprobs:
            trail = Trail(candidates.logprobs[place], self.live[parent].trail)
        return Continuation(parent, int(candidates.token_ids[place]), Beam(total, trail))

    def _is_settled(self, num_output: int) -> bool:
        """Return whether enough is found, and the live beams are not expected to be better."""
        rules = self._rules
        if len(self.found) < rules.width:
            return False
        if rules.early_stopping is True:
            return True
        length = num_output
        if rules.early_stopping == "never" and rules.length_penalty > 0:
            length = self._max_tokens
        return rules.score(self.live[0].cum_logprob, length) <= self.found[-1].score
