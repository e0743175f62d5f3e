"""Input and result of the second half of a worker's start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from quire.compute.kv_transfer.pool_memory import PoolMemory
from quire.compute.kv_transfer.tiers import Tiers
from quire.compute.runner.launch import Runner

__all__ = ["Assembly", "PoolSize"]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: blocks of the KV pool. max_model_len: tokens of the longest sequence.
    num_host_blocks: blocks of the swap space. max_captured_rows: most rows of a captured decode
    step; 0 captures none."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    max_captured_rows: int = 0


@dataclass(frozen=True, slots=True)
class Assembly:
    """Parts that compute steps. tiers: memory for blocks beyond the device. memory: pool for moves
    to a disk; None on a device that is not the host. computing: makes a context in which torch's
    work is done in the order of the steps."""

    runner: Runner
    memory: PoolMemory | None
    tiers: Tiers
    computing: Callable[[], AbstractContextManager[object]]
