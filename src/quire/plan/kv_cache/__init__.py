"""Block bookkeeping of the paged KV cache: integers only (PagedAttention paper, 4.2-4.5)."""

from quire.plan.kv_cache.hashing import NO_EXTRAS, BlockExtras, BlockHasher
from quire.plan.kv_cache.manager import KVManager
from quire.plan.kv_cache.pool import BlockPool
from quire.plan.kv_cache.prefix_lookup import PrefixHit, PrefixLookup
from quire.plan.kv_cache.saved_tables import SavedTables
from quire.plan.kv_cache.sources import ELSEWHERE, BlockSource
from quire.plan.kv_cache.table_updates import TableUpdates

__all__ = [
    "ELSEWHERE",
    "NO_EXTRAS",
    "BlockExtras",
    "BlockHasher",
    "BlockPool",
    "BlockSource",
    "KVManager",
    "PrefixHit",
    "PrefixLookup",
    "SavedTables",
    "TableUpdates",
]
