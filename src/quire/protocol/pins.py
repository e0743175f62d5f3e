"""An engine's account of the prefixes that it was told to keep."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import RequestError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import IntArray

__all__ = ["PIN_PARAMS", "KeptPin", "PinnedPrefix", "pin_seconds", "prefix_key"]

PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a request that pins its prompt: it is computed like any other, up to the draw of
one token."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """handle, name, tenant: identity of the request that pinned it (`EngineRequest.request_id`,
    `SchedulingParams.tenant`). num_blocks: KV blocks that it holds. hits: requests that started
    from it. seconds_left: time until it is let go, inf for ever. is_shared: it serves requests of
    every salt. key: `prefix_key`. Equal keys are one pin, whose handle and name are those of the
    first request.
    """

    handle: int
    num_tokens: int
    num_blocks: int
    hits: int
    seconds_left: float
    name: str
    tenant: str
    is_shared: bool
    key: str


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A prefix to pin again. name, tenant, salt: identity, as in `PinnedPrefix`, and salt of its
    request. expires_s: end, in seconds since 1970; None for no end."""

    name: str
    tenant: str
    salt: str
    token_ids: IntArray
    expires_s: float | None


def prefix_key(
    token_ids: Sequence[int] | IntArray, salt: str, *, is_shared: bool, adapter: str = ""
) -> str:
    """Equal for prefixes that serve the same requests: the tokens, whose they are, and the digest
    of their adapter."""
    owner = b"" if is_shared else b"\1" + salt.encode()
    tokens = np.asarray(token_ids, np.int32).tobytes()
    head = b"".join(len(part).to_bytes(8, "little") + part for part in (owner, adapter.encode()))
    return hashlib.blake2b(head + tokens, digest_size=16).hexdigest()


def pin_seconds(ttl_s: object) -> float:
    """Return the seconds for which to keep a prefix; None asks for no end. RequestError unless they
    are above 0."""
    if ttl_s is None:
        return math.inf
    if isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool) and ttl_s > 0:
        return ttl_s
    raise RequestError(f"ttl_s is {ttl_s!r}: give seconds above 0, or None for no end")
