"""Names the blocks of running sequences, so that others find them, and finds those of others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.kv_cache import BlockHasher, KVManager, PrefixHit
from quire.protocol.step import IntArray
from quire.scheduler.sequence import Sequence
from quire.scheduler.table import SequenceTable

__all__ = ["PrefixCache"]


class PrefixCache:
    """A block is published as soon as the step that completes it is planned and the values of its
    tokens are known: rows of the same plan and of later ones may read it."""

    def __init__(
        self, table: SequenceTable, kv: KVManager, hasher: BlockHasher, enabled: bool
    ) -> None:
        self._table = table
        self._kv = kv
        self._hasher = hasher
        self._enabled = enabled

    def name_prompt(self, salt: str, token_ids: IntArray) -> tuple[bytes, list[bytes]]:
        """Root and names of the full blocks of a request that arrives."""
        root = self._hasher.root(salt)
        names: list[bytes] = []
        if self._enabled:
            self._hasher.extend(names, token_ids, root)
        return root, names

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """What is cached of a waiting sequence, its last token excepted. A request that asks for
        prompt logprobs must see all of its prompt computed."""
        if not self._enabled or sequence.group.request.params.prompt_logprobs is not None:
            return self._kv.lookup([], 0)
        self._hasher.extend(sequence.names, sequence.token_ids, sequence.group.root)
        return self._kv.lookup(sequence.names, len(sequence.token_ids) - 1)

    def publish(self, slots: npt.NDArray[np.int64]) -> None:
        """Publish the full blocks of these slots, each a token's K/V that are planned and known."""
        if not self._enabled:
            return
        table = self._table
        full = np.minimum(table.num_known[slots], table.num_computed[slots]) // self._kv.block_size
        due = np.flatnonzero(full > self._kv.num_published(slots))
        for slot, count in zip(slots[due].tolist(), full[due].tolist(), strict=True):
            self._publish(slot, count)

    def publish_to(self, slot: int, num_tokens: int) -> None:
        """Publish the blocks within the first `num_tokens` of one slot, planned and known."""
        if self._enabled:
            self._publish(slot, num_tokens // self._kv.block_size)

    def _publish(self, slot: int, num_blocks: int) -> None:
        sequence = self._table.at(slot)
        if len(sequence.names) < num_blocks:
            known = self._table.known_tokens(slot)
            self._hasher.extend(sequence.names, known, sequence.group.root)
        self._kv.publish(slot, sequence.names, num_blocks)
