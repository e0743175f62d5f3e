"""Finds out why a request went as it did: from the prompts before it, and from the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.base.errors import QuireError
from quire.protocol.control import TellFacts
from quire.protocol.status import RequestFacts
from quire.server.generation.backend import Backend
from quire.server.readings.explanation import cache_sentences, seen_by, slow_sentences
from quire.server.readings.prompt_memory import CacheVerdict, KnownPrompt, Match, PromptMemory
from quire.server.readings.timeline import Timeline

__all__ = ["Findings", "Inquiry"]

PATIENCE_S = 2.0
"""Seconds to wait for an engine that is asked about a request."""

SAME_S = 0.1
"""A request in the engine that is older than a timeline by more than this had its id before."""


@dataclass(frozen=True, slots=True)
class Findings:
    """facts: facts of each prompt of a request, as its caller may see them; empty if the engine has
    forgotten it. verdict: why its prompt was computed again; None for a request without text, and
    before its first step."""

    facts: tuple[RequestFacts, ...]
    verdict: CacheVerdict | None

    def sentences(self, timeline: Timeline) -> tuple[list[str], list[str]]:
        """Return where the time of the request went, and why its prompt was computed again."""
        verdict = self.verdict
        return (
            slow_sentences(timeline, self.facts),
            [] if verdict is None else cache_sentences(verdict),
        )


class Inquiry:
    """Answers for requests of which the timeline is known, open or ended."""

    def __init__(self, backend: Backend, memory: PromptMemory) -> None:
        self._backend = backend
        self._memory = memory

    async def about(self, timeline: Timeline) -> Findings:
        """Return all that is known of a request. It takes at most `PATIENCE_S`."""
        if timeline.queued_s is None:
            return Findings((), None)  # the engine never had it
        prompt = self._prompt_of(timeline)
        match = None if prompt is None else await self._match(prompt)
        compared = () if match is None else (match.other.timeline.request_id,)
        facts = await self._facts(timeline.tenant, (timeline.request_id, *compared))
        verdict = None if prompt is None else prompt.verdict(match, self._block_size, facts)
        latest_s = timeline.now() + SAME_S
        own = [
            each
            for each in facts
            if each.request_id == timeline.request_id and each.age_s < latest_s
        ]
        return Findings(seen_by(timeline.tenant, own), verdict)

    async def verdict(self, timeline: Timeline) -> CacheVerdict | None:
        """Return why its prompt was computed again, as far as the server alone knows."""
        prompt = self._prompt_of(timeline)
        if prompt is None:
            return None
        return prompt.verdict(await self._match(prompt), self._block_size)

    def _prompt_of(self, timeline: Timeline) -> KnownPrompt | None:
        prompt = self._memory.find(timeline.request_id, timeline.tenant)
        is_known = prompt is not None and prompt.timeline is timeline
        return prompt if is_known and timeline.scheduled_s is not None else None

    async def _match(self, prompt: KnownPrompt) -> Match | None:
        """Compare prompts in a thread: they may have millions of tokens."""
        earlier = self._memory.before(prompt)
        return await asyncio.to_thread(prompt.match, earlier, self._block_size)

    async def _facts(self, tenant: str, request_ids: tuple[str, ...]) -> tuple[RequestFacts, ...]:
        """Ask the engine about requests. One that cannot answer, or is busy, knows nothing."""
        client = self._backend.client
        if client is None:
            return ()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return (await client.control(TellFacts(tenant, request_ids))).facts
        except (QuireError, TimeoutError):
            return ()

    @property
    def _block_size(self) -> int:
        capacity = self._backend.status.capacity
        return 1 if capacity is None else capacity.block_size
