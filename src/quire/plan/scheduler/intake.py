"""Requests come in, whole or piece by piece, and become groups that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from quire.base.errors import RequestError
from quire.config.feasibility import Feasibility
from quire.plan.kv_cache import NO_EXTRAS, BlockExtras
from quire.plan.scheduler.beams.intake import new_beam_group
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.readings.records import Record
from quire.plan.scheduler.sequence import Sequence, SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray

__all__ = ["Openings", "RequestIntake", "Watches"]

Watches = Callable[[EngineRequest], bool]
"""Predicate: verdicts decide what the client of a request gets."""


@dataclass(frozen=True, slots=True)
class Openings:
    """Tickets on which the groups of a request are blocked before they compute: one for each group
    whose grammar must be compiled, and one for each whose adapter needs a slot."""

    grammar: list[int] = field(default_factory=list[int])
    adapter: list[int] = field(default_factory=list[int])


class RequestIntake:
    """Refuses requests that can never be served, and adds the others to the roster."""

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        feasibility: Feasibility,
        watches: Watches | None,
        guesses: Callable[[EngineRequest], bool],
    ) -> None:
        """guesses: whether tokens of a request are guessed."""
        self._state = state
        self._lifecycle = lifecycle
        self._feasibility = feasibility
        self._watches = watches
        self._guesses = guesses
        self._num_groups = 0

    def add(self, request: EngineRequest) -> Openings:
        """Queue a request. RequestError if it could never be served by this engine."""
        max_total = self._feasibility.max_total_tokens(request)
        request.scheduling.check_policy(uses_priority=self._state.waiting.uses_priority)
        if request.pin_seconds is not None:
            self._state.pins.check(request)
        if request.is_open and request.grammar is not None:
            raise RequestError(
                "structured output is not offered for prompts that arrive piece by piece. Send the "
                "prompt whole, or leave the grammar out."
            )
        tokens = np.concatenate((request.prompt_token_ids, request.output_token_ids))
        tokens = tokens.astype(np.int32, copy=False)
        extras = NO_EXTRAS
        if request.media or request.adapter is not None:
            extras = BlockExtras(request.adapter_digest, request.media)
        root, names = self._state.prefixes.name_prompt(request.salt, tokens, extras)
        states, message_ends = self._state.states, ()
        if states is not None:
            message_ends = states.spaced_ends(request.message_ends)
        pins_hit = set[int]()
        is_watched = (
            self._watches is not None and request.pooling is None and self._watches(request)
        )
        if is_watched and request.beams is not None:
            raise RequestError(
                "beam search is not offered for requests whose outputs are watched by hooks. Ask "
                "for samples (n)."
            )
        openings = Openings()
        for samples in self._feasibility.split(request, max_total):
            group = SequenceGroup(
                request,
                self._num_groups,
                root,
                max_total,
                Record.of(request, self._state.roster.clock),
                is_watched=is_watched,
                is_guessed=self._guesses(request),
                pins_hit=pins_hit,
                extras=extras,
                message_ends=message_ends,
            )
            self._num_groups += 1
            first, *unborn = samples
            group.sequences.append(Sequence(group, first, tokens, list(names)))
            if request.beams is None:
                group.unborn = tuple(unborn)
            else:
                group.beams = new_beam_group(request, request.beams, max_total)
            if request.grammar is not None:
                openings.grammar.append(self._state.tickets.start(group, "its grammar"))
            if request.adapter is not None:
                openings.adapter.append(self._state.tickets.start(group, "its adapter"))
            self._lifecycle.queue(group)
            self._state.deadlines.watch(group, self._state.speed.last_known)
        return openings

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> bool:
        """Append `token_ids`, int32 [N], to the prompt of an open request; `is_last` ends the
        prompt. Return False, and change nothing, if the request has ended meanwhile.
        Raises RequestError if the prompt is not open, or becomes too long."""
        group = self._state.roster.groups.get(handle)
        if group is None:
            return False
        length = len(group.request.prompt_token_ids) + len(token_ids)
        max_total = self._feasibility.max_total_of_prompt(group.request, length)
        prompt = np.concatenate((group.request.prompt_token_ids, token_ids)).astype(np.int32)
        group.request = replace(group.request, prompt_token_ids=prompt, is_open=not is_last)
        if is_last:
            group.max_total_tokens = max_total
        sequence = group.sequences[0]
        if sequence.slot >= 0:
            self._state.table.extend(sequence.slot, token_ids)
            if not group.is_coming_in:
                self._state.builder.extend(sequence.slot, token_ids)
            if is_last:
                self._state.table.close(sequence.slot, max_total)
        else:
            sequence.token_ids = prompt
        self._lifecycle.input_arrived(group)
        return True
