"""Prompts of the last requests, as hashes and counts, and why a later one found less in the cache.

Tokens are kept as 32 bits of a product with a number that this process drew, and the parts of a
chat as keyed digests: equal ones can be told from others, and nobody can read them.
"""

from __future__ import annotations

import enum
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.protocol.media import Media
from quire.protocol.status import LoadOutcome, RequestFacts
from quire.server.readings.chat_parts import ChatParts, Place, digest
from quire.server.readings.timeline import Timeline

__all__ = ["CacheVerdict", "KnownPrompt", "Match", "MissKind", "PromptMemory"]

MAX_TOKENS = 8_000_000
"""Tokens that are remembered together: four bytes each."""

_FACTOR = np.uint64(secrets.randbits(64) | 1)

Hashes = npt.NDArray[np.uint32]


class MissKind(enum.StrEnum):
    """Reasons why tokens of a prompt were computed."""

    NOTHING_BEFORE = "nothing_before"
    """No earlier prompt begins alike."""
    NOTHING_MISSED = "nothing_missed"
    """All that an earlier prompt has in common was found, but for a block that was not full."""
    DIFFERENCE = "difference"
    """A token differs from the earlier prompt's."""
    SALT = "salt"
    ADAPTER = "adapter"
    MEDIA = "media"
    WEIGHTS = "weights"
    EMPTIED = "emptied"
    REPLICA = "replica"
    EVICTED = "evicted"
    TIER = "tier"
    STATE = "state"
    NOT_YET = "not_yet"
    """The earlier prompt had not been computed yet."""
    WHOLE = "whole"
    """The request asks for values of every prompt token."""
    OFF = "off"
    """Prefixes are not cached."""
    UNKNOWN = "unknown"


def _hashes(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> Hashes:
    wide = np.asarray(token_ids, np.int64).astype(np.uint64)
    return ((wide * _FACTOR) >> np.uint64(32)).astype(np.uint32)


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """One prompt. tokens: hashes of its tokens and then of its first answer's. tail: first token of
    what the template wrote after the last message. salt: digest."""

    memory: PromptMemory
    timeline: Timeline
    number: int
    tokens: Hashes
    num_prompt: int
    tail: int
    salt: bytes
    adapter: str
    media: tuple[tuple[int, str], ...]
    parts: ChatParts | None
    is_kept: bool = True

    def answered(self, token_ids: Sequence[int]) -> None:
        """Remember the first answer to it."""
        if self.is_kept and token_ids:
            self.tokens = np.concatenate((self.tokens, _hashes(token_ids)))
            self.memory.grow(len(token_ids))

    def compared(self, name: str, block_size: int) -> CacheVerdict | None:
        """Return why it was not found as far as it goes along with the request or answer of this
        id, as far as the server alone knows; None if no earlier one has the id."""
        other = self.memory.find(name, self.timeline.tenant)
        if other is None or other.number >= self.number:
            return None
        return self.verdict(Match.of(self, other), block_size)

    def match(self, earlier: Sequence[KnownPrompt], block_size: int) -> Match | None:
        """Return the earlier prompt that explains most: the newest of those with the most common
        tokens. One that the engine may not use must have a block more than others. None if they
        have nothing in common but how each prompt begins. earlier: oldest first. Threads may call
        it; it compares up to `MAX_TOKENS` tokens."""
        best: Match | None = None
        most = -1
        for other in reversed(earlier):
            if best is not None and most >= 0 and not self._agrees_at(other, most):
                continue  # it has no more in common
            match = Match.of(self, other)
            is_usable = match.kind in (MissKind.DIFFERENCE, MissKind.MEDIA)
            weight = match.num_common if is_usable else match.num_common - block_size + 1
            if best is None or weight > most:
                best, most = match, weight
        return best if best is not None and _is_like(self, best, block_size) else None

    def _agrees_at(self, other: KnownPrompt, place: int) -> bool:
        if place >= min(self.num_prompt, len(other.tokens)):
            return False
        return bool(self.tokens[place] == other.tokens[place])

    def verdict(
        self, match: Match | None, block_size: int, facts: Sequence[RequestFacts] = ()
    ) -> CacheVerdict:
        """Return why it was not found as far as it could have been. match: see `match`. facts:
        facts about it and earlier requests, as far as they are known; without them the reasons that
        only the engine knows are UNKNOWN."""
        facts_of_own = _facts_of(self, facts)
        own = None if facts_of_own is None else facts_of_own.cache
        num_cached = self.timeline.num_cached_tokens if own is None else own.num_cached
        found = CacheVerdict(
            MissKind.NOTHING_BEFORE, self.num_prompt, num_cached, block_size=block_size
        )
        if own is not None and not own.is_on:
            return replace(found, kind=MissKind.OFF)
        if own is not None and not own.reads:
            return replace(found, kind=MissKind.WHOLE)
        if match is None:
            return found
        other, num_common, kind = match.other, match.num_common, match.kind
        found = replace(
            found,
            kind=kind,
            num_common=num_common,
            num_reusable=_whole(min(num_common, self.num_prompt - 1), block_size),
            num_earlier=len(other.tokens),
            compared=other.timeline.request_id,
            seconds_before=self.timeline.arrived_at - other.timeline.arrived_at,
        )
        if kind is MissKind.MEDIA:
            return replace(found, token=num_common)
        if kind is not MissKind.DIFFERENCE:
            return found
        if num_cached < found.num_reusable:
            return _lost(found, self, other, facts)
        if num_common in (self.num_prompt, len(other.tokens)):
            return replace(found, kind=MissKind.NOTHING_MISSED)
        return replace(found, token=num_common, place=_place(self, other, num_common))

    def num_common(self, earlier: KnownPrompt) -> int:
        """Return the number of first tokens that its prompt and an earlier one have in common."""
        length = min(self.num_prompt, len(earlier.tokens))
        differs = self.tokens[:length] != earlier.tokens[:length]
        return int(differs.argmax()) if differs.any() else length

    def first_media(self, earlier: KnownPrompt, end: int) -> int | None:
        """Return the place of the first media before `end` that differ."""
        mine, theirs = dict(self.media), dict(earlier.media)
        differing = {at for at in mine.keys() | theirs.keys() if mine.get(at) != theirs.get(at)}
        return min((at for at in differing if at < end), default=None)


@dataclass(frozen=True, slots=True)
class CacheVerdict:
    """Why a prompt was not found as far as an earlier one goes.

    num_cached: tokens that were found. num_common: first tokens of both. num_reusable: tokens of
    these that fill blocks. num_earlier: tokens of the earlier prompt and its answer. token: number
    of the first token that differs, from 0. load: outcome of a tier.
    """

    kind: MissKind
    num_prompt: int
    num_cached: int
    num_common: int = 0
    num_reusable: int = 0
    num_earlier: int = 0
    compared: str = ""
    seconds_before: float = 0.0
    token: int | None = None
    place: Place | None = None
    load: LoadOutcome = LoadOutcome.NONE
    block_size: int = 0

    @property
    def goes_on(self) -> bool:
        """True if the prompt goes on where the earlier one ended, as far as its sender knows."""
        is_behind = self.place is not None and self.place.name in ("answer", "generation_prompt")
        return is_behind or self.kind is MissKind.NOTHING_MISSED

    @property
    def changed(self) -> str | None:
        """The part that is another one now: a `Place.name`, or "model"; None if none is known."""
        if self.kind is MissKind.ADAPTER:
            return "model"
        if self.kind is MissKind.MEDIA:
            return "message"
        return None if self.place is None else self.place.name

    @property
    def num_missed(self) -> int:
        """Tokens that were computed, and would have been found if the prompt began like all of the
        earlier one."""
        return max(min(self.num_earlier, self.num_prompt) - self.num_cached, 0)


class PromptMemory:
    """The last prompts of all keys; only those of one key are compared."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._prompts: deque[KnownPrompt] = deque()
        self._num_tokens = 0
        self._num_added = 0

    def add(
        self,
        timeline: Timeline,
        token_ids: npt.NDArray[np.int32],
        *,
        tail: int,
        salt: str,
        adapter: str,
        media: Iterable[Media],
        parts: ChatParts | None,
    ) -> KnownPrompt:
        """Remember a prompt that is sent to the engine."""
        self._num_added += 1
        prompt = KnownPrompt(
            self,
            timeline,
            self._num_added,
            _hashes(token_ids),
            len(token_ids),
            tail,
            digest(salt),
            adapter,
            tuple((each.span.position, each.digest.hex()) for each in media),
            parts,
        )
        self._prompts.append(prompt)
        self.grow(len(token_ids))
        return prompt

    def grow(self, num_tokens: int) -> None:
        """Make room for tokens that have come: the oldest prompts go."""
        self._num_tokens += num_tokens
        while self._prompts and (
            len(self._prompts) > self._num_kept or self._num_tokens > MAX_TOKENS
        ):
            oldest = self._prompts.popleft()
            oldest.is_kept = False
            self._num_tokens -= len(oldest.tokens)

    def find(self, name: str, tenant: str) -> KnownPrompt | None:
        """Return the newest prompt of a tenant whose request or answer has this id."""
        for prompt in reversed(self._prompts):
            if prompt.timeline.tenant == tenant and prompt.timeline.is_named(name):
                return prompt
        return None

    def before(self, prompt: KnownPrompt) -> list[KnownPrompt]:
        """Return earlier prompts of its tenant, oldest first."""
        tenant = prompt.timeline.tenant
        return [
            each
            for each in self._prompts
            if each.number < prompt.number and each.timeline.tenant == tenant
        ]


def _whole(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size * block_size


def _facts_of(prompt: KnownPrompt, facts: Iterable[RequestFacts]) -> RequestFacts | None:
    """Return the facts about a prompt, once it was admitted."""
    name, found = prompt.timeline.request_id, None
    for each in facts:
        is_own = each.request_id == name and each.cache is not None
        if is_own and each.cache is not None and each.cache.num_prompt == prompt.num_prompt:
            found = each
    return found


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier prompt with the tokens that it has in common. kind: DIFFERENCE, or what keeps the
    engine from using them."""

    other: KnownPrompt
    num_common: int
    kind: MissKind

    @classmethod
    def of(cls, prompt: KnownPrompt, other: KnownPrompt) -> Match:
        num_common = prompt.num_common(other)
        at = prompt.first_media(other, num_common)
        if prompt.salt != other.salt:
            return cls(other, num_common, MissKind.SALT)
        if prompt.adapter != other.adapter:
            return cls(other, num_common, MissKind.ADAPTER)
        if at is not None:
            return cls(other, at, MissKind.MEDIA)
        return cls(other, num_common, MissKind.DIFFERENCE)


def _is_like(prompt: KnownPrompt, match: Match, block_size: int) -> bool:
    if match.num_common >= block_size or prompt.num_prompt <= block_size:
        return match.num_common > 0
    one, other = prompt.parts, match.other.parts
    return one is not None and other is not None and one.is_like(other)


def _lost(
    found: CacheVerdict, prompt: KnownPrompt, other: KnownPrompt, facts: Sequence[RequestFacts]
) -> CacheVerdict:
    """Return why blocks were not there that an earlier prompt had: the engine's own reasons."""
    own, earlier = _facts_of(prompt, facts), _facts_of(other, facts)
    if own is None or own.cache is None:
        return replace(found, kind=MissKind.UNKNOWN)
    mine, kind = own.cache, MissKind.UNKNOWN
    was = None if earlier is None else earlier.cache
    if earlier is not None and earlier.core != own.core:
        kind = MissKind.REPLICA
    elif was is not None and was.weights_version != mine.weights_version:
        kind = MissKind.WEIGHTS
    elif was is not None and was.num_resets != mine.num_resets:
        kind = MissKind.EMPTIED
    elif mine.load is not LoadOutcome.NONE:
        kind = MissKind.TIER
    elif mine.is_evicted:
        kind = MissKind.EVICTED
    elif _was_under_way(prompt.timeline, other.timeline):
        kind = MissKind.NOT_YET
    elif mine.needs_states:
        kind = MissKind.STATE
    return replace(found, kind=kind, load=mine.load)


def _was_under_way(timeline: Timeline, earlier: Timeline) -> bool:
    """Return whether an earlier prompt was not computed when a request was admitted."""
    begun_s = timeline.arrived_at + (timeline.scheduled_s or 0.0)
    if earlier.first_token_s is None:
        return earlier.finished_s is None
    return earlier.arrived_at + earlier.first_token_s > begun_s


def _place(prompt: KnownPrompt, other: KnownPrompt, num_common: int) -> Place:
    """Return the part in which a token differs first."""
    if prompt.parts is None or other.parts is None:
        return Place("answer" if num_common >= other.num_prompt else "prompt")
    place = prompt.parts.place(other.parts)
    if place is not None:
        return place
    if num_common >= other.num_prompt:
        return Place("answer", len(other.parts.messages), "assistant")
    is_tail = num_common >= (
        other.tail if len(prompt.parts.messages) > len(other.parts.messages) else prompt.tail
    )
    return Place("generation_prompt" if is_tail else "template")
