"""Readings of the engine, each declared once, with its meaning and its name in /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

__all__ = [
    "STEP_TOKEN_BOUNDS",
    "EngineStats",
    "Metric",
    "SchedulerStats",
    "engine_metrics",
    "scheduler_metrics",
]

STEP_TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `EngineStats.step_tokens`; one bucket more is above the last."""


_OF_REQUESTS = (
    "num_running", "num_waiting", "num_used_blocks", "num_cached_blocks", "num_table_entries",
    "num_tokens_in_used_blocks", "num_used_host_blocks", "num_named_host_blocks",
    "num_named_disk_blocks", "num_pins", "num_pinned_blocks",
    "running_adapters", "waiting_adapters", "mm_cache_bytes",
)  # fmt: skip
"""Readings of what is in the engine at the moment."""


def _reading(*metrics: tuple[str, str], default: Any = 0) -> Any:
    """A field of a reading. metrics: (name, help text) of each metric that shows it."""
    return field(default=default, metadata={"metrics": metrics})


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler. Gauges show the moment; names in `_total` count since the core
    started, and start again at 0 when it is restarted.

    num_running, num_waiting: requests. num_blocks = free + used + cached. num_used_blocks: held by
    sequences. num_cached_blocks: free, but with a prefix that may be hit.
    num_table_entries: blocks that the block tables name; 1 - num_used_blocks / num_table_entries is
        what sharing saves (PagedAttention, section 6.3).
    num_host_blocks, num_used_host_blocks: blocks of the swap space.
    swapped_out_total, swapped_in_total: preempted requests that went there, and that came back.
    num_named_host_blocks: host blocks with evicted blocks; a prefix may be loaded from them.
    blocks_stored_total, blocks_removed_total: blocks that sources of K/V beyond the device stored
        and removed, under names.
    blocks_unstored_total: blocks whose copies there failed. blocks_loaded_total, blocks_lost_total:
        copies to the device that succeeded and failed.
    late_loads_total: loads that their requests did not wait for.
    loads_started_total: requests that something was loaded for. loads_declined_total: requests that
        computed what could have been loaded, since that was cheaper.
    num_disk_blocks, num_named_disk_blocks: blocks that fit on the disk, and those that are there.
    disk_read_seconds_total, disk_write_seconds_total: time of its threads.
    num_pins, num_pinned_blocks: pinned prefixes, and the blocks that they hold.
    prompt_tokens_total, cached_tokens_total: tokens of admitted requests, and those found in the
        cache.
    prefill_tokens_per_s: rate of the last steps that computed prompts; 0.0 before the first one.
    drafted_rows_total: rows that verified drafts in a step. draft_tokens_total: drafts of these
        rows.
    accepted_drafts_total: drafts that were right. accepted_drafts_at: the same, indexed by place in
        the row.
    mm_cache_queries_total, mm_cache_hits_total: images that were put, and those that were encoded
        before. mm_cache_bytes: bytes of encoded images that are kept for later requests. The core
        counts them.
    """

    num_running: int = _reading(("vllm:num_requests_running", "Requests that compute."))
    num_waiting: int = _reading(("vllm:num_requests_waiting", "Requests that wait to compute."))
    num_blocks: int = _reading(("quire:kv_blocks", "KV blocks."))
    num_used_blocks: int = 0
    num_cached_blocks: int = _reading(("quire:kv_blocks_cached", "Free ones with a prefix."))
    num_table_entries: int = 0
    num_tokens_in_used_blocks: int = _reading(("quire:kv_tokens", "Tokens in KV blocks in use."))
    preempted_total: int = _reading(("vllm:num_preemptions", "Requests that lost their blocks."))
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    swapped_out_total: int = _reading(("quire:swapped_out_requests", "Preempted to host memory."))
    swapped_in_total: int = _reading(("quire:swapped_in_requests", "Back from host memory."))
    num_named_host_blocks: int = _reading(
        ("quire:host_kv_blocks_cached", "KV blocks in host memory with a prefix.")
    )
    blocks_stored_total: int = _reading(("quire:kv_blocks_stored", "Kept when evicted."))
    blocks_removed_total: int = _reading(("quire:kv_blocks_removed", "Kept ones dropped again."))
    blocks_unstored_total: int = _reading(("quire:kv_blocks_unstored", "Copies out that failed."))
    blocks_loaded_total: int = _reading(("quire:kv_blocks_loaded", "Copied back for a prefix."))
    blocks_lost_total: int = _reading(("quire:kv_blocks_lost", "Copies back that failed."))
    late_loads_total: int = _reading(("quire:kv_late_loads", "Not waited for any longer."))
    loads_started_total: int = _reading(("quire:kv_loads_started", "Requests that loaded K/V."))
    loads_declined_total: int = _reading(
        ("quire:kv_loads_declined", "Requests that computed what costs more to load.")
    )
    num_disk_blocks: int = _reading(("quire:disk_kv_blocks", "KV blocks that the disk may hold."))
    num_named_disk_blocks: int = _reading(
        ("quire:disk_kv_blocks_cached", "KV blocks on the disk with a prefix.")
    )
    disk_read_seconds_total: float = _reading(
        ("quire:disk_kv_read_seconds", "Time of loads from the disk."), default=0.0
    )
    disk_write_seconds_total: float = _reading(
        ("quire:disk_kv_write_seconds", "Time of saves to the disk."), default=0.0
    )
    num_pins: int = _reading(("quire:pinned_prefixes", "Prefixes that stay in the cache."))
    num_pinned_blocks: int = _reading(("quire:pinned_kv_blocks", "KV blocks of pinned prefixes."))
    prompt_tokens_total: int = _reading(("vllm:prefix_cache_queries", "Prompt tokens looked up."))
    cached_tokens_total: int = _reading(
        ("vllm:prompt_tokens_cached", "From the cache."),
        ("vllm:prefix_cache_hits", "Prompt tokens found."),
    )
    steps_total: int = _reading(("quire:engine_steps", "Steps of the engine."))
    prefill_tokens_per_s: float = _reading(
        ("quire:prefill_tokens_per_second", "Prompt tokens per second, of the last such steps."),
        default=0.0,
    )
    drafted_rows_total: int = _reading(
        ("vllm:spec_decode_num_drafts", "Rows that verified drafts, step by step.")
    )
    draft_tokens_total: int = _reading(
        ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.")
    )
    accepted_drafts_total: int = _reading(
        ("vllm:spec_decode_num_accepted_tokens", "Drafts that were right.")
    )
    accepted_drafts_at: tuple[int, ...] = ()
    mm_cache_queries_total: int = _reading(
        ("vllm:mm_cache_queries", "Images looked up among the encoded ones.")
    )
    mm_cache_hits_total: int = _reading(("vllm:mm_cache_hits", "Images found there."))
    mm_cache_bytes: int = _reading(("quire:mm_cache_bytes", "Encoded images that are kept."))

    def without_moment(self) -> Self:
        """Return the same counters, with nothing in the engine."""
        zeros = {each: type(getattr(self, each))() for each in _OF_REQUESTS if hasattr(self, each)}
        return replace(self, **zeros)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that sequences hold, 0 … 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def host_kv_cache_usage(self) -> float:
        """Share of the swap space's blocks that hold preempted requests, 0 … 1; 0 without any."""
        num_blocks = self.num_host_blocks
        return self.num_used_host_blocks / num_blocks if num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats(SchedulerStats):
    """A reading of the engine core, reported with every heartbeat.

    generation_tokens_total: tokens sampled and sent. step_seconds_total: time spent in steps.
    step_tokens: number of steps that sampled at most so many tokens, per bucket of
    `STEP_TOKEN_BOUNDS`. requests_total: requests taken. refused_total: requests that the core could
    never serve. aborted_total: sequences that clients ended early. garbled_messages_total: messages
    of clients that could not be read. kv_event_batches_total: batches of KV events that were sent.
    kv_events_dropped_total: KV events that were not, since too many waited. max_adapters: slots of
    adapters. running_adapters, waiting_adapters: names of adapters that requests have, or wait for.
    rank_cpu_seconds, rank_resident_bytes: usage of the process of each rank of the model; empty
    with one rank, and with ranks on several hosts.
    """

    generation_tokens_total: int = 0
    requests_total: int = 0
    refused_total: int = _reading(("quire:engine_refused_requests", "Refused by the engine."))
    aborted_total: int = 0
    step_seconds_total: float = _reading(
        ("quire:engine_step_seconds", "Time in steps."), default=0.0
    )
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
    kv_event_batches_total: int = _reading(("quire:kv_event_batches", "Sent to subscribers."))
    kv_events_dropped_total: int = _reading(("quire:kv_events_dropped", "Not sent in time."))
    garbled_messages_total: int = _reading(("quire:garbled_messages", "Between front and core."))
    max_adapters: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    rank_cpu_seconds: tuple[float, ...] = ()
    rank_resident_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, scheduler: SchedulerStats, **own: Any) -> Self:
        """A scheduler's reading, and what the core counts itself."""
        found = {each.name: getattr(scheduler, each.name) for each in fields(SchedulerStats)}
        return cls(**found, **own)


@dataclass(frozen=True, slots=True)
class Metric:
    """One reading. is_counter: the reading only grows; others show the moment."""

    name: str
    value: float
    is_counter: bool
    help: str


def scheduler_metrics(stats: SchedulerStats) -> list[Metric]:
    """All that a reading has, and the share of KV blocks in use."""
    share = Metric("vllm:kv_cache_usage_perc", stats.kv_cache_usage, False, "Share of KV blocks.")
    found = engine_metrics(stats)
    return [*(Metric(name, value, counts, text) for name, text, value, counts in found), share]


def engine_metrics(stats: SchedulerStats) -> Iterator[tuple[str, str, float, bool]]:
    """Name, help text and value of each metric that a field declares, and whether it counts."""
    for each in fields(stats):
        for name, text in each.metadata.get("metrics", ()):
            yield name, text, float(getattr(stats, each.name)), each.name.endswith("_total")
