"""Prefixes that stay in the cache because an operator said so (Kwon et al. 2023, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.base.errors import RequestError
from quire.plan.kv_cache import KVManager, PrefixHit, SavedTables
from quire.plan.scheduler.sequence import Sequence
from quire.protocol.pins import KeptPin, PinnedPrefix
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.step import IntArray

__all__ = ["PinnedPrefixes"]

MAX_PINNED_SHARE = 0.5
"""Largest pinned share of the pool: pins must not crowd out computing requests."""


@dataclass(slots=True, eq=False)
class _Pin:
    """A held sequence. root: root of its tenant's block names, None if it is for all. names: names
    of its full blocks, and of the parts of its state on a disk. expires: time on the clock of
    `plan`. hits: requests that have used it. key: name of the prefix, the same for equal prefixes,
    which are one pin."""

    request: EngineRequest
    root: bytes | None
    held: SavedTables
    names: list[bytes]
    expires: float
    key: str
    hits: int = 0

    @property
    def handle(self) -> int:
        return self.request.first_handle

    @property
    def token_ids(self) -> IntArray:
        return self.request.prompt_token_ids


class PinnedPrefixes:
    """Pinned sequences. Requests that start with their tokens branch off from them: full blocks and
    the partly filled last one are shared, and copied on write. With recurrent states, they branch
    off from the last place where a prefix can end, and the checkpoint there is held. A pin yields
    only to a request that could otherwise never run. A disk keeps its blocks before all others.

    version: number that grows with each change of `kept`.
    """

    def __init__(self, kv: KVManager, *, is_cache_on: bool = True) -> None:
        """is_cache_on: whether prefixes are cached, without which no state is kept."""
        self._kv = kv
        self._is_cache_on = is_cache_on
        self._now = 0.0
        self._pins: dict[int, _Pin] = {}  # by handle; those used longest ago first
        self._lost: dict[str, None] = {}  # keys, in order
        self.version = 0

    def check(self, request: EngineRequest) -> None:
        """RequestError if the request cannot be pinned."""
        if request.media:
            raise RequestError("a prompt with embeddings cannot be pinned: pin text or token ids")
        is_plain = request.beams is None and not request.is_open
        if request.params.n != 1 or request.params.max_tokens != 1 or not is_plain:
            raise RequestError(
                "a request that pins its prompt has n=1, max_tokens=1, no beams and a whole prompt"
            )
        if self._equal(request.pin_key) is not None:
            return
        total, wanted = self._kv.pool.num_blocks, self._num_blocks(len(request.prompt_token_ids))
        room = self._limit - self.num_blocks
        if not self._has_room_for_state(len(request.prompt_token_ids)):
            raise RequestError(
                f"a pin keeps a checkpoint of the model's recurrent state, and of "
                f"{self._num_checkpoints} at most half are for pins, all of them taken: unpin "
                "another prefix, or give the engine more with num_state_checkpoints "
                "(--num-state-checkpoints) and enable_prefix_caching"
            )
        if wanted > room:
            raise RequestError(
                f"a prefix of {len(request.prompt_token_ids)} tokens takes {wanted} KV blocks, but "
                f"of the {total} there are only {max(room, 0)} more may be pinned: unpin another "
                "one, shorten it, or give the cache more memory"
            )

    @property
    def _limit(self) -> int:
        return int(self._kv.pool.num_blocks * MAX_PINNED_SHARE)

    def _num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a prefix that shares nothing with other pins."""
        return self._kv.layout.blocks_for(num_tokens)

    @property
    def _num_checkpoints(self) -> int:
        """Checkpoints of states that prefixes may start from."""
        states = self._kv.states
        return 0 if states is None or not self._is_cache_on else states.num_checkpoints

    def _has_room_for_state(self, num_tokens: int) -> bool:
        """Return whether one more checkpoint may be held, where a prefix of so many tokens needs
        one."""
        if not self._needs_state(num_tokens):
            return True
        held = {pin.held.checkpoint for pin in self._pins.values()} - {None}
        return len(held) < int(self._num_checkpoints * MAX_PINNED_SHARE)

    def _needs_state(self, num_tokens: int) -> bool:
        """Return whether a prefix of so many tokens is of use only with a state."""
        return self._kv.states is not None and self._num_usable(num_tokens) > 0

    def _num_usable(self, num_tokens: int) -> int:
        """Return how many tokens others skip who start with a pinned prefix of so many."""
        grid = 1 if self._kv.states is None else self._kv.layout.hit_tokens
        return num_tokens - num_tokens % grid

    def keep(self, sequence: Sequence, finish: SequenceFinish) -> SequenceFinish:
        """Pin a sequence that ends with its whole prompt computed. Return how its request ends."""
        request = sequence.group.request
        if request.pin_seconds is None or finish.reason is FinishReason.ABORT:
            return finish
        if sequence.slot < 0 or finish.reason is FinishReason.ERROR:
            message = finish.message or "its blocks were taken before it was pinned: pin it again"
            return SequenceFinish(finish.handle, FinishReason.ERROR, message=message)
        prompt, key = request.prompt_token_ids, request.pin_key
        if (pin := self._equal(key)) is not None:
            pin.expires = max(pin.expires, self._now + request.pin_seconds)
            self.version += 1
            return finish
        has_room = self.num_blocks + self._num_blocks(len(prompt)) <= self._limit
        if not (has_room and self._has_room_for_state(len(prompt))):
            message = "others were pinned meanwhile, and no more may be: unpin one and pin it again"
            return SequenceFinish(finish.handle, FinishReason.ERROR, message=message)
        checkpoint = self._state_after(sequence, len(prompt))
        if checkpoint is None and self._needs_state(len(prompt)):
            message = "its recurrent state was replaced before it was pinned: pin it again"
            return SequenceFinish(finish.handle, FinishReason.ERROR, message=message)
        self._lost.pop(key, None)
        self.version += 1
        names = self._kv.names_to_guard(sequence.names, len(prompt))
        self._kv.sources.guard(names)
        self._pins[finish.handle] = _Pin(
            request=request,
            root=None if request.pin_is_shared else sequence.group.root,
            held=self._kv.hold(sequence.slot, len(prompt), checkpoint),
            names=names,
            expires=self._now + request.pin_seconds,
            key=key,
        )
        return finish

    def _state_after(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Return the checkpoint at the last place within so many tokens where a prefix can end. It
        has the sequence's name there, or is of a pin that ends there. A pin's may have another
        tenant's name, or none after a reset, and a sequence that starts from it saves no other."""
        found = self._kv.state_within(sequence.names, num_tokens)
        if found is not None or self._kv.states is None:
            return found
        usable = self._num_usable(num_tokens)
        fitting = (
            pin for pin in self._pins.values() if _starts_with(sequence.token_ids, pin, sequence)
        )
        alike = (pin for pin in fitting if self._num_usable(len(pin.token_ids)) == usable)
        return next((pin.held.checkpoint for pin in alike), None)

    def _equal(self, key: str) -> _Pin | None:
        return next((pin for pin in self._pins.values() if pin.key == key), None)

    def match(self, sequence: Sequence) -> SavedTables | None:
        """The longest pinned prefix of a waiting sequence."""
        tokens = sequence.token_ids
        fitting = [pin for pin in self._pins.values() if _starts_with(tokens, pin, sequence)]
        if not fitting:
            return None
        return max((pin.held for pin in fitting), key=lambda held: held.num_tokens)

    def note_hit(self, hit: PrefixHit, sequence: Sequence) -> None:
        """Count a hit for the pins that a sequence entered with. All sequences of a request count
        once, however often they enter; one that pins a prefix itself does not count."""
        counted = sequence.group.pins_hit
        is_pin = sequence.group.request.pin_seconds is not None
        for pin in list(self._pins.values()):
            usable = self._num_usable(len(pin.token_ids))
            is_used = hit.num_tokens >= min(usable, len(sequence.token_ids) - 1)
            if usable and is_used and _starts_with(sequence.token_ids, pin, sequence):
                pin.hits += not is_pin and pin.handle not in counted
                counted.add(pin.handle)
                self._pins[pin.handle] = self._pins.pop(pin.handle)

    def expire(self, now: float) -> None:
        self._now = now
        for pin in [pin for pin in self._pins.values() if pin.expires <= now]:
            self.release(pin.handle)

    def release(self, handle: int) -> bool:
        """Release a pinned prefix; return whether there was one."""
        pin = self._pins.pop(handle, None)
        if pin is None:
            return False
        self.version += 1
        self._kv.release_held(pin.held)
        self._kv.sources.unguard(pin.names)
        return True

    def release_one(self) -> bool:
        """Release the least recently used pin, though nobody asked for its end; return whether
        there was any."""
        pin = next(iter(self._pins.values()), None)
        if pin is None:
            return False
        if pin.root is None:
            self._lost[pin.key] = None
        return self.release(pin.handle)

    def release_all(self) -> None:
        while self.release_one():
            pass

    @property
    def lost(self) -> tuple[str, ...]:
        """Keys of the shared pins that were released though nobody asked for it, and have not been
        pinned again."""
        return tuple(self._lost)

    def kept(self, now: float, time_s: float) -> list[KeptPin]:
        """Return what another engine needs to hold the same. Pins for all salts are left out, since
        whoever shares them names them at each start, and so are those of adapters. time_s: seconds
        since 1970 at `now`."""
        return [
            KeptPin(
                name=pin.request.request_id,
                tenant=pin.request.scheduling.tenant,
                salt=pin.request.salt,
                token_ids=pin.token_ids,
                expires_s=None if pin.expires == math.inf else time_s + pin.expires - now,
            )
            for pin in self._pins.values()
            if pin.expires > now and pin.root is not None and pin.request.adapter is None
        ]

    def __len__(self) -> int:
        return len(self._pins)

    def tables(self) -> Iterator[tuple[int, ...]]:
        """Yield the blocks of the first layer group of each pin that holds them from the start."""
        return (p.held.blocks[0] for p in self._pins.values() if not p.held.first[0])

    @property
    def num_blocks(self) -> int:
        """Distinct KV blocks that are held."""
        return len(self.blocks)

    @property
    def blocks(self) -> set[int]:
        """The KV blocks that are held."""
        return {block for pin in self._pins.values() for block in pin.held.all_blocks()}

    def list(self, now: float) -> tuple[PinnedPrefix, ...]:
        """Return the pins that are held."""
        return tuple(
            PinnedPrefix(
                handle=pin.handle,
                num_tokens=len(pin.token_ids),
                num_blocks=len(pin.held.all_blocks()),
                hits=pin.hits,
                seconds_left=max(pin.expires - now, 0.0) if pin.expires != math.inf else math.inf,
                name=pin.request.request_id,
                tenant=pin.request.scheduling.tenant,
                is_shared=pin.root is None,
                key=pin.key,
            )
            for pin in self._pins.values()
            if pin.expires > now
        )


def _starts_with(tokens: IntArray, pin: _Pin, sequence: Sequence) -> bool:
    length = len(pin.token_ids)
    return (
        pin.root in (None, sequence.group.root)
        and pin.request.adapter_digest == sequence.group.request.adapter_digest
        and len(tokens) >= length
        and all(each.span.position >= length for each in sequence.group.request.media)
        and np.array_equal(tokens[:length], pin.token_ids)
    )
