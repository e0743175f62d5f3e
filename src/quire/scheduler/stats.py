"""What the scheduler tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler; counts since start where the name says `total`.

    num_table_entries: blocks that the block tables name; 1 - num_used_blocks / num_table_entries is
        what sharing saves (PagedAttention, section 6.3).
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_table_entries: int
    num_tokens_in_used_blocks: int
    preempted_total: int
    num_host_blocks: int
    num_used_host_blocks: int
    swapped_out_total: int
    swapped_in_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    steps_total: int
