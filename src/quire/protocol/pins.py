"""What an engine says of the prefixes that it was told to keep."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PinnedPrefix"]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """handle, name, tenant: of the request that pinned it (`EngineRequest.request_id`,
    `SchedulingParams.tenant`). num_blocks: KV blocks that it holds. hits: requests that started
    from it. seconds_left: until it is let go, inf for ever. is_shared: for requests of every salt.
    """

    handle: int
    num_tokens: int
    num_blocks: int
    hits: int
    seconds_left: float
    name: str
    tenant: str
    is_shared: bool
