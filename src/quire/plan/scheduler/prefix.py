"""Names the blocks of running sequences, so that others find them, and finds those of others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.plan.kv_cache import BlockExtras, BlockHasher, KVManager, PrefixHit, PrefixLookup
from quire.plan.kv_cache.events import Chain
from quire.plan.scheduler.pins import PinnedPrefixes
from quire.plan.scheduler.sequence import Sequence, SequenceGroup
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.pooling_params import reads_whole_prompt
from quire.protocol.status import CacheFacts
from quire.protocol.step import IntArray

__all__ = ["PrefixCache"]

Slots = npt.NDArray[np.int64]


class PrefixCache:
    """A block is published as soon as the step that completes it is planned and the values of its
    tokens are known: rows of the same plan and of later ones may read it.

    keeps_states: whether there are checkpoints of recurrent states, without which nothing is found
    (`KeptStates`).
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        hasher: BlockHasher,
        pins: PinnedPrefixes,
        enabled: bool,
    ) -> None:
        self._table = table
        self._kv = kv
        self._hasher = hasher
        self._pins = pins
        self._enabled = enabled
        self.keeps_states = enabled and kv.states is not None and kv.states.num_checkpoints > 0

    def name_prompt(
        self, salt: str, token_ids: IntArray, extras: BlockExtras
    ) -> tuple[bytes, list[bytes]]:
        """Root and names of the full blocks of a request that arrives."""
        root = self._hasher.root(salt)
        names: list[bytes] = []
        if self._enabled:
            self._hasher.extend(names, token_ids, root, extras)
        return root, names

    def forget_weights(self, groups: Iterable[SequenceGroup]) -> None:
        """The weights have changed: these groups, which hold no K/V, get new names."""
        self._hasher.raise_version()
        for group in groups:
            group.root = self._hasher.root(group.request.salt)
            for sequence in group.sequences:
                sequence.names = []

    def may_serve(self, sequence: Sequence) -> bool:
        """Return whether a sequence may start from a cached prefix. A request that asks for prompt
        logprobs must see all of its prompt computed, and so must one that pools it."""
        request = sequence.group.request
        is_whole = request.params.prompt_logprobs is not None
        return not (is_whole or reads_whole_prompt(request.pooling))

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """Find the cached prefix of a waiting sequence, its last token excepted."""
        return self._lookup(self._kv.prefixes, sequence)

    def lookup_all(self, sequence: Sequence) -> PrefixHit:
        """The same with blocks that sources hold, which are `ELSEWHERE`."""
        return self._lookup(self._kv.all_prefixes, sequence)

    def _lookup(self, prefixes: PrefixLookup, sequence: Sequence) -> PrefixHit:
        if not self.may_serve(sequence):
            return prefixes.lookup([], 0)
        if self._enabled:
            group = sequence.group
            self._hasher.extend(sequence.names, sequence.token_ids, group.root, group.extras)
        max_tokens = len(sequence.token_ids) - 1
        return prefixes.lookup(sequence.names, max_tokens, self._pins.match(sequence))

    def touch(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Note that a sequence uses a cached prefix."""
        num_names = hit.num_tokens // self._kv.block_size
        if num_names:
            self._kv.touch(sequence.names, num_names)

    def facts(self, sequence: Sequence, hit: PrefixHit) -> CacheFacts:
        """Return what is known of a sequence's cached prefix, which is `hit`, as it is admitted."""
        size = self._kv.block_size
        return CacheFacts(
            is_on=self._enabled,
            reads=self.may_serve(sequence),
            block_size=size,
            num_prompt=len(sequence.group.request.prompt_token_ids),
            num_cached=hit.num_tokens,
            is_evicted=self._kv.was_evicted(sequence.names, hit.num_tokens // size),
            needs_states=self._kv.states is not None,
            num_resets=self._kv.num_resets,
            weights_version=self._hasher.weights_version,
        )

    def num_uncached(self, group: SequenceGroup) -> int:
        """Tokens that a waiting group would have to compute now."""
        return sum(
            len(sequence.token_ids) - self.lookup(sequence).num_tokens
            for sequence in group.sequences
        )

    def publish(self, slots: Slots) -> None:
        """Publish the full blocks of these slots, each a token's K/V that are planned and known."""
        if not self._enabled:
            return
        table = self._table
        full = np.minimum(table.num_known[slots], table.num_computed[slots]) // self._kv.block_size
        lacking = full - self._kv.num_published(slots)
        next_ones = (lacking == 1).nonzero()[0]
        if len(next_ones):
            self._publish_next(slots[next_ones], full[next_ones] - 1)
        for i in (lacking > 1).nonzero()[0].tolist():
            self._publish(int(slots[i]), int(full[i]))

    def _publish_next(self, slots: Slots, index: Slots) -> None:
        """The block at `index` of each slot: the steady case, with one pass over the tokens."""
        size = self._kv.block_size
        places = (index * size)[:, None] + np.arange(size)
        data = self._table.token_ids[slots[:, None], places].tobytes()
        stride = len(data) // len(slots)
        chains: list[list[bytes]] = []
        for i, (slot, place) in enumerate(zip(slots.tolist(), index.tolist(), strict=True)):
            sequence = self._table.at(slot)
            chain = sequence.names
            if len(chain) == place:
                group = sequence.group
                parent = chain[-1] if chain else group.root
                extras = group.extras.of(place * size, (place + 1) * size)
                block = data[i * stride : (i + 1) * stride]
                chain.append(self._hasher.name(parent, block, extras))
            chains.append(chain)
        if (events := self._kv.events) is not None:
            places = zip(slots.tolist(), index.tolist(), strict=True)
            events.describe((self._chain_of(slot), at, at + 1) for slot, at in places)
        self._kv.publish_next(slots, chains)
        if events is not None:
            events.describe(())

    def publish_to(self, slot: int, num_tokens: int) -> None:
        """Publish the blocks within the first `num_tokens` of one slot, planned and known."""
        if self._enabled:
            self._publish(slot, num_tokens // self._kv.block_size)

    def _publish(self, slot: int, num_blocks: int) -> None:
        sequence = self._table.at(slot)
        if len(sequence.names) < num_blocks:
            known = self._table.known_tokens(slot)
            group = sequence.group
            self._hasher.extend(sequence.names, known, group.root, group.extras)
        if (events := self._kv.events) is not None:
            first = int(self._kv.num_published(np.array([slot]))[0])
            events.describe([(self._chain_of(slot), first, num_blocks)])
        self._kv.publish(slot, sequence.names, num_blocks)
        if events is not None:
            events.describe(())

    def _chain_of(self, slot: int) -> Chain:
        """Return the named blocks of a slot."""
        return _chain(self._table.at(slot), self._table.token_ids[slot])

    def tell_tokens(self, group: SequenceGroup) -> None:
        """Let events know the tokens of blocks that a waiting group found beyond the device."""
        if (events := self._kv.events) is not None:
            for sequence in group.sequences:
                events.learn(_chain(sequence, sequence.token_ids))


def _chain(sequence: Sequence, token_ids: IntArray) -> Chain:
    request = sequence.group.request
    adapter = None if request.adapter is None else request.adapter.name
    return Chain(sequence.names, token_ids, adapter, request.salt, sequence.group.extras)
