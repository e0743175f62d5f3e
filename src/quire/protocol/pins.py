"""What an engine says of the prefixes that it was told to keep."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PinnedPrefix"]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """handle: of the request that pinned it. num_blocks: KV blocks that it holds. hits: requests
    that started from it. seconds_left: until it is let go, inf for ever."""

    handle: int
    num_tokens: int
    num_blocks: int
    hits: int
    seconds_left: float
