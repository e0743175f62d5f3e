"""One sequence becomes two, which share all that is computed."""

from __future__ import annotations

from quire.kv_cache import KVManager
from quire.scheduler.sequence import Sequence
from quire.scheduler.table import SequenceTable

__all__ = ["branch_off"]


def branch_off(
    source: Sequence, sample_index: int, table: SequenceTable, kv: KVManager
) -> Sequence:
    """A copy of a running sequence in a slot of its own, over the same blocks. The caller adds it
    to the group."""
    tokens = table.known_tokens(source.slot)
    sequence = Sequence(source.group, sample_index, tokens, list(source.names))
    dst = table.enter(sequence, int(table.num_computed[source.slot]))
    kv.fork(source.slot, dst)
    return sequence
