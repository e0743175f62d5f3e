"""The counters that the engine core reports with every heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEP_TOKEN_BOUNDS", "EngineStats"]

STEP_TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `EngineStats.step_tokens`; one bucket more is above the last."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine core. Gauges are of the moment; names in `_total` count since the
    core started, and start again at 0 when it is restarted.

    num_running, num_waiting: requests. num_blocks = free + used + cached.
    num_host_blocks, num_used_host_blocks: of the swap space. swapped_out_total, swapped_in_total:
    preempted requests that went there, and that came back.
    num_used_blocks: held by sequences. num_cached_blocks: free, but with a prefix that may be hit.
    prompt_tokens_total, cached_tokens_total: of admitted requests; of these, found in the cache.
    generation_tokens_total: sampled and sent. step_seconds_total: time spent in steps.
    step_tokens: per bucket of `STEP_TOKEN_BOUNDS`, steps that sampled at most so many tokens.
    refused_total: requests that the core could never serve. aborted_total: sequences that clients
    ended early. garbled_messages_total: messages of clients that could not be read.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_tokens_in_used_blocks: int = 0
    preempted_total: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    swapped_out_total: int = 0
    swapped_in_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_total: int = 0
    refused_total: int = 0
    aborted_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
    garbled_messages_total: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 … 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def host_kv_cache_usage(self) -> float:
        """Share of the swap space's blocks that hold preempted requests, 0 … 1; 0 without any."""
        num_blocks = self.num_host_blocks
        return self.num_used_host_blocks / num_blocks if num_blocks else 0.0
