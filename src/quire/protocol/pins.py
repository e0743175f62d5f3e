"""What an engine says of the prefixes that it was told to keep."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.sampling_params import SamplingParams

__all__ = ["PIN_PARAMS", "PinnedPrefix"]

PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Of a request that pins its prompt: it is computed like any other, up to the draw of one token."""


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
