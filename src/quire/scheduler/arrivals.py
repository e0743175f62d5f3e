"""Requests come in, whole or piece by piece, and become groups that wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.config.admission import Admission
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray
from quire.scheduler.beams import new_beam_group
from quire.scheduler.deadlines import Deadlines, PrefillSpeed
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policy import Policy
from quire.scheduler.prefix import PrefixCache
from quire.scheduler.roster import Roster
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable

__all__ = ["Arrivals"]


class Arrivals:
    """Refuses what can never be served, and puts the rest on the roster."""

    def __init__(
        self,
        table: SequenceTable,
        builder: PlanBuilder,
        roster: Roster,
        admission: Admission,
        policy: Policy,
        prefixes: PrefixCache,
        pins: PinnedPrefixes,
        deadlines: Deadlines,
        speed: PrefillSpeed,
    ) -> None:
        self._table = table
        self._builder = builder
        self._roster = roster
        self._admission = admission
        self._policy = policy
        self._prefixes = prefixes
        self._pins = pins
        self._deadlines = deadlines
        self._speed = speed
        self._num_groups = 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if it could never be served by this engine."""
        max_total = self._admission.max_total_tokens(request)
        request.scheduling.check_policy(uses_priority=self._policy.uses_priority)
        if request.pin_seconds is not None:
            self._pins.check(request)
        tokens = np.concatenate((request.prompt_token_ids, request.output_token_ids))
        tokens = tokens.astype(np.int32, copy=False)
        root, names = self._prefixes.name_prompt(request.salt, tokens)
        pins_hit = set[int]()
        for samples in self._admission.split(request, max_total):
            group = SequenceGroup(request, self._num_groups, root, max_total, pins_hit=pins_hit)
            self._num_groups += 1
            first, *unborn = samples
            group.sequences.append(Sequence(group, first, tokens, list(names)))
            if request.beams is None:
                group.unborn = tuple(unborn)
            else:
                group.beams = new_beam_group(request, request.beams, max_total)
            self._roster.queue(group)
            self._deadlines.watch(group, self._speed.last_known)

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        """The prompt of an open request goes on with `token_ids`, int32 [N]; `is_last` ends it. One
        that has ended meanwhile is ignored. RequestError if it is not open, or grows too long."""
        group = self._roster.groups.get(handle)
        if group is None:
            return
        length = len(group.request.prompt_token_ids) + len(token_ids)
        max_total = self._admission.max_total_of_prompt(group.request, length)
        prompt = np.concatenate((group.request.prompt_token_ids, token_ids)).astype(np.int32)
        group.request = replace(group.request, prompt_token_ids=prompt, is_open=not is_last)
        if is_last:
            group.max_total_tokens = max_total
        sequence = group.sequences[0]
        if sequence.slot >= 0:
            self._table.extend(sequence.slot, token_ids)
            self._builder.extend(sequence.slot, token_ids)
            if is_last:
                self._table.close(sequence.slot, max_total)
        else:
            sequence.token_ids = prompt
        if group.state is GroupState.PARKED and (is_last or length > 1):
            self._roster.wake(group)
