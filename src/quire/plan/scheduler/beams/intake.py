"""Beam searches over rows: candidates come in; forks, tokens and leaves go out."""

from __future__ import annotations

import numpy as np

from quire.plan.scheduler.beams.search import BeamSearch, Continuation, FoundSequence
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.sequence import BeamGroup, Sequence, SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.beam_search import BeamRules
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish, WholeSequence
from quire.protocol.step import TokenCandidates

__all__ = ["BeamIntake", "new_beam_group"]


def new_beam_group(request: EngineRequest, rules: BeamRules, max_total_tokens: int) -> BeamGroup:
    """The search of a request that asks for one."""
    max_tokens = max_total_tokens - len(request.prompt_token_ids)
    return BeamGroup(
        BeamSearch(rules, max_tokens, request.ending),
        rules.width,
        rules.width + len(request.stop_token_ids),
        list(range(request.params.n)),
    )


class BeamIntake:
    """Follows beam searches. A row that gives candidates has no token to compute until it is given
    one. So a beam group is not planned ahead of its own result, and skips the steps that were in
    flight."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._table = state.table
        self._builder = state.builder
        self._lifecycle = lifecycle

    def take(self, sequence: Sequence, candidates: TokenCandidates) -> None:
        """Take the candidates of one row. After those of the last row, the search advances by a
        token."""
        group, beams = sequence.group, sequence.group.beams
        if beams is None:
            raise LookupError(f"slot {sequence.slot} gives candidates but is no beam")
        beams.candidates[sequence] = candidates
        if len(beams.candidates) == len(group.sequences):
            self._advance(group, beams)

    def _advance(self, group: SequenceGroup, beams: BeamGroup) -> None:
        num_prompt = len(group.request.prompt_token_ids)
        outputs = [self._table.known_tokens(s.slot)[num_prompt:] for s in group.sequences]
        candidates = [beams.candidates[sequence] for sequence in group.sequences]
        beams.candidates.clear()
        going_on = beams.search.advance(candidates, outputs)
        if beams.search.is_done:
            self._finish(group, beams)
        else:
            self._branch(group, going_on)

    def _branch(self, group: SequenceGroup, going_on: list[Continuation]) -> None:
        """Apply the search's choice to rows. A beam's first continuation keeps its slot, its other
        continuations fork from there, and a beam without continuations leaves. Then the chosen
        tokens are appended."""
        parents = list(group.sequences)
        for index in set(range(len(parents))) - {step.parent for step in going_on}:
            self._lifecycle.drop(parents[index])
        in_place = set[int]()
        group.sequences = []
        for step in going_on:
            parent = parents[step.parent]
            is_first = step.parent not in in_place
            in_place.add(step.parent)
            group.sequences.append(parent if is_first else self._fork(parent))
        slots = np.array([sequence.slot for sequence in group.sequences], np.int64)
        tokens = np.array([step.token_id for step in going_on], np.int32)
        self._table.append(slots, tokens)
        self._builder.append(slots, tokens)

    def _fork(self, parent: Sequence) -> Sequence:
        sequence = self._lifecycle.branch_off(parent, parent.sample_index)
        self._builder.start_fork(parent.slot, sequence.slot)
        return sequence

    def _finish(self, group: SequenceGroup, beams: BeamGroup) -> None:
        found = beams.search.found
        first_handle = group.request.first_handle
        finishes = [
            _finish_as(first_handle + rank, found[rank])
            if rank < len(found)
            else _finish_without(first_handle + rank, len(found))
            for rank in beams.wanted
        ]
        self._lifecycle.end_group(group, finishes)


def _finish_as(handle: int, found: FoundSequence) -> SequenceFinish:
    trail = found.beam.trail
    logprobs = () if trail is None else trail.unwind()
    whole = WholeSequence(found.output, found.beam.cum_logprob, logprobs)
    return SequenceFinish(handle, found.reason, found.stop_token_id, whole=whole)


def _finish_without(handle: int, num_found: int) -> SequenceFinish:
    message = (
        f"the search found no more than {num_found} sequences, since the request bans all others: "
        "allow more tokens, or ask for fewer sequences"
    )
    return SequenceFinish(handle, FinishReason.ERROR, message=message, is_request_fault=True)
