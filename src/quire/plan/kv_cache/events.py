"""Events of the blocks that can be found by name, for routers beyond the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from quire.base.telemetry.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KVEvent,
    block_hash,
)
from quire.config.kv_layout import GroupKind, KVLayout
from quire.plan.kv_cache.hashing import BlockExtras
from quire.plan.kv_cache.notices import BlockName, Notice, NoticeKind
from quire.protocol.step import IntArray

__all__ = ["MEDIA", "Chain", "EventLog"]

MEDIA: Mapping[str, str] = MappingProxyType({"device": "GPU", "host": "CPU", "disk": "STORAGE"})
"""Media of events, by those of notices. The pool that attention reads is "GPU" on CPUs too, as in
vLLM: routers take it for blocks that cost no load, and host memory is another place."""

_KINDS: Mapping[GroupKind, str] = MappingProxyType(
    {"full": "full_attention", "window": "sliding_window", "latent": "mla_attention"}
)


class Chain(NamedTuple):
    """Blocks of a sequence. names: their names, from the first one on. token_ids: at least the
    tokens of these. adapter: name of its adapter. salt: salt of its tenant."""

    names: Sequence[bytes]
    token_ids: IntArray
    adapter: str | None
    salt: str
    extras: BlockExtras


class _Origin(NamedTuple):
    """Content of a block. parent: name of the block before it. token_ids: int32 in memory order;
    empty if they are unknown."""

    parent: bytes | None = None
    token_ids: bytes = b""
    adapter: str | None = None
    extra_keys: tuple[ExtraKey, ...] | None = None


@dataclass(slots=True)
class _Held:
    """A block that events have told of. media: media that hold it."""

    origin: _Origin
    media: set[str] = field(default_factory=set[str])


class EventLog:
    """Turns notices of holders into events. A block of the device is told of when the steps that
    compute it have ended well, and so is everything that was stored after it there.

    Tokens are not part of notices: `describe` tells those of blocks that are about to be published.
    They are kept while any medium holds the block.
    """

    def __init__(
        self,
        layout: KVLayout,
        unsettled: Callable[[], Collection[bytes]],
        num_leaving: int,
        parent_of: Callable[[BlockName], bytes | None] = lambda _: None,
    ) -> None:
        """unsettled: returns names whose publication may still be retracted. num_leaving: evicted
        blocks that may be on their way to another medium. parent_of: returns the name before a
        block that nobody described, such as one that another engine has written to the disk."""
        self._groups = layout.groups
        self._block_size = layout.block_size
        self._unsettled = unsettled
        self._num_leaving = num_leaving
        self._parent_of = parent_of
        self._places: dict[bytes, tuple[Chain, int]] = {}
        self._pending: dict[BlockName, _Origin] = {}
        self._held: dict[BlockName, _Held] = {}
        self._leaving: dict[BlockName, _Origin] = {}
        # It forgets the blocks of an engine that was here before.
        self._events: list[KVEvent] = [AllBlocksCleared()]

    # --- learning ------------------------------------------------------------------------------

    def start_with(self, medium: str, blocks: Iterable[tuple[BlockName, bytes | None]]) -> None:
        """Take in blocks that a medium has from an earlier run, and the parent of each. Nobody
        knows their tokens before a prompt finds them."""
        for block, parent in blocks:
            if block[0] < len(self._groups):
                self._store(medium, block, _Origin(parent))

    def describe(self, parts: Iterable[tuple[Chain, int, int]]) -> None:
        """Take in blocks that are published next, until the next call: parts of chains, from one
        index to another."""
        self._places = {
            chain.names[i]: (chain, i) for chain, first, end in parts for i in range(first, end)
        }

    def learn(self, chain: Chain) -> None:
        """Take in the tokens of blocks that some medium has, as a prompt found them."""
        for index, name in enumerate(chain.names):
            for group in range(len(self._groups)):
                held = self._held.get((group, name))
                if held is not None and not held.origin.token_ids:
                    held.origin = self._origin(chain, index, group)

    def note(self, notice: Notice) -> None:
        """Take in a notice. It is a `Listener`. Parts of states, which are in a group of their own,
        are not told of."""
        medium, block = notice.medium, notice.block
        if block is None:
            self._clear(medium)
        elif block[0] >= len(self._groups):
            return
        elif notice.kind is NoticeKind.REMOVED:
            self._remove(medium, block)
        elif medium == "device":
            self._pending[block] = self._find_origin(block)
        else:
            self._store(medium, block, self._find_origin(block))

    def _find_origin(self, block: BlockName) -> _Origin:
        group, name = block
        if (place := self._places.get(name)) is not None:
            return self._origin(*place, group)
        held = self._held.get(block)
        if held is not None:
            return held.origin
        origin = self._leaving.get(block)
        return _Origin(self._parent_of(block)) if origin is None else origin

    def _origin(self, chain: Chain, index: int, group: int) -> _Origin:
        """Return the content of the group's block that ends with a name of a chain."""
        num_names = self._groups[group].tokens_per_block // self._block_size
        first = index + 1 - num_names
        start, end = first * self._block_size, (index + 1) * self._block_size
        keys: list[ExtraKey] = [] if chain.adapter is None else [chain.adapter]
        keys += [
            (each.digest.hex(), each.span.position - start)
            for each in chain.extras.media
            if max(start, each.span.position) < min(end, each.span.end)
        ]
        if chain.salt and not start:
            keys.append(chain.salt)
        return _Origin(
            chain.names[first - 1] if first > 0 else None,
            chain.token_ids[start:end].astype(np.int32).tobytes(),
            chain.adapter,
            tuple(keys) or None,
        )

    # --- holders -------------------------------------------------------------------------------

    def _store(self, medium: str, block: BlockName, origin: _Origin) -> None:
        held = self._held.setdefault(block, _Held(origin))
        self._leaving.pop(block, None)
        if medium not in held.media:
            held.media.add(medium)
            self._tell_stored(medium, block, held.origin)

    def _remove(self, medium: str, block: BlockName) -> None:
        if medium == "device" and (origin := self._pending.pop(block, None)) is not None:
            self._leave(block, origin)
            return
        held = self._held.get(block)
        if held is None or medium not in held.media:
            return
        held.media.remove(medium)
        if not held.media:
            del self._held[block]
            self._leave(block, held.origin)
        self._tell_removed(medium, block)

    def _leave(self, block: BlockName, origin: _Origin) -> None:
        """Keep the content of a block that goes, in case another medium takes it."""
        if self._num_leaving:
            self._leaving[block] = origin
            while len(self._leaving) > self._num_leaving:
                del self._leaving[next(iter(self._leaving))]

    def _clear(self, medium: str) -> None:
        """Forget what a medium had. Events have no word for that, but for all media together."""
        if medium == "device":
            self._pending.clear()
        gone = [block for block, held in self._held.items() if medium in held.media]
        for block in gone:
            self._remove(medium, block)
        self._leaving.clear()
        if not self._held:
            self._events = [AllBlocksCleared()]

    # --- events --------------------------------------------------------------------------------

    def settle(self, unsettled: Collection[bytes] = ()) -> None:
        """Tell of what the device has published, up to the first of these names. Without names, no
        step is in flight, and nothing is retracted any more."""
        for block in list(self._pending):
            if block[1] in unsettled:
                break
            self._store("device", block, self._pending.pop(block))

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, those of steps in flight excepted."""
        if self._pending:
            self.settle(self._unsettled())
        events, self._events = self._events, []
        return events

    def take_all(self) -> list[KVEvent]:
        """Return events that lead from any state to the present one, in place of `take`. Parents
        come before their children."""
        self.take()
        self._events.append(AllBlocksCleared())
        blocks = list(self._from_parents())
        for medium in MEDIA:
            for block in blocks:
                held = self._held[block]
                if medium in held.media:
                    self._tell_stored(medium, block, held.origin)
        events, self._events = self._events, []
        return events

    def _from_parents(self) -> Iterator[BlockName]:
        """All blocks, each after its parent."""
        done: set[BlockName] = set()
        for each in self._held:
            block, line = each, list[BlockName]()
            while block in self._held and block not in done:
                done.add(block)
                line.append(block)
                block = (block[0], self._held[block].origin.parent or b"")
            yield from reversed(line)

    def _tell_stored(self, medium: str, block: BlockName, origin: _Origin) -> None:
        group, name = block
        parent = None if origin.parent is None else block_hash(origin.parent)
        tokens: list[int] = np.frombuffer(origin.token_ids, np.int32).tolist()
        keys, place = origin.extra_keys, MEDIA[medium]
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and (last.medium, last.group_idx, last.lora_name) == (place, group, origin.adapter)
            and last.block_hashes[-1] == parent
            and bool(last.token_ids) == bool(tokens)
        ):
            if keys is not None and last.extra_keys is None:
                last.extra_keys = list(repeat(None, len(last.block_hashes)))
            if last.extra_keys is not None:
                last.extra_keys.append(keys)
            last.block_hashes.append(block_hash(name))
            last.token_ids += tokens
            return
        of_group = self._groups[group]
        self._events.append(
            BlockStored(
                block_hashes=[block_hash(name)],
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=of_group.tokens_per_block,
                lora_id=None,
                medium=place,
                lora_name=origin.adapter,
                extra_keys=None if keys is None else [keys],
                group_idx=group,
                kv_cache_spec_kind=_KINDS[of_group.kv.kind],
                kv_cache_spec_sliding_window=of_group.window,
            )
        )

    def _tell_removed(self, medium: str, block: BlockName) -> None:
        group, name = block
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (
            MEDIA[medium],
            group,
        ):
            last.block_hashes.append(block_hash(name))
            return
        self._events.append(BlockRemoved([block_hash(name)], MEDIA[medium], group))
