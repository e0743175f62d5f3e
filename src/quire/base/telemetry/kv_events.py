"""KV events: their settings and their messages, in the names of vLLM.

A batch is a msgpack array, and each event in it a map with its kind under `type`, as vLLM 0.33.0
sends them. Fields are left out where they have their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

import msgspec

from quire.base.errors import ConfigError, quoted
from quire.base.foreign import nearest

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ExtraKey",
    "KVEvent",
    "KVEventBatch",
    "KVEventsSettings",
    "block_hash",
    "parse_kv_events",
]


ExtraKey = str | tuple[str, int]
"""Name of an adapter, salt of a tenant, or digest of a medium and its place relative to the block's
first token."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that a medium holds from now on; each follows the one before it in a prompt.

    block_hashes: results of `block_hash`. parent_block_hash: hash of the block before the first;
    None if the first begins a prompt. token_ids: tokens of all blocks, in order; empty where the
    engine has not seen them. block_size: tokens per block. lora_id: always None. medium: see
    `quire.plan.kv_cache.events`. extra_keys: for each block, what changes its K/V beside tokens.
    group_idx: layer group. kv_cache_spec_kind: its attention.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of a layer group that a medium no longer holds."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No medium holds any block."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """ts: seconds since the epoch. data_parallel_rank: number of the replica."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def block_hash(name: bytes) -> int:
    """Return a block's name as events have it: its last 8 bytes, big-endian. Every consumer of
    vLLM's events reads 64 bits."""
    return int.from_bytes(name[-8:], "big")


@dataclass(frozen=True, slots=True)
class KVEventsSettings:
    """endpoint: address of the events. replay_endpoint: address at which subscribers ask for past
    batches; None for none. buffer_steps: past batches that are kept. hwm: messages that wait for a
    slow subscriber. max_queue_size: batches that wait for the thread that sends them. topic: first
    frame of each message."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def of_replica(self, rank: int) -> Self:
        """Return the settings with the addresses of a replica: ports follow each other."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_of_replica(self.endpoint, rank),
            replay_endpoint=None if replay is None else _of_replica(replay, rank),
        )


def _of_replica(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


_SWITCHES = ("enable_kv_cache_events", "publisher")
_NUMBERS = ("buffer_steps", "hwm", "max_queue_size")


def parse_kv_events(text: str | None) -> KVEventsSettings | None:
    """Settings of a JSON object; None if it asks for no events. ConfigError if it is invalid."""
    if text is None:
        return None
    given = cast("Mapping[str, Any]", json.loads(text))
    known = (*_SWITCHES, *(item.name for item in fields(KVEventsSettings)))
    for name in given:
        if name not in known:
            near = nearest(name, known)
            advice = f"Did you mean {near}?" if near else f"Use some of: {', '.join(known)}."
            raise ConfigError(f"kv_events_config has no key {quoted(name)}. {advice}")
    is_on = given.get("enable_kv_cache_events", False)
    if not isinstance(is_on, bool):
        raise _invalid("enable_kv_cache_events", is_on, "true or false")
    publisher = given.get("publisher")
    if publisher not in (None, "zmq", "null"):
        raise _invalid("publisher", publisher, '"zmq" or "null"')
    chosen = {name: value for name, value in given.items() if name not in _SWITCHES}
    for name in _NUMBERS:
        value = chosen.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise _invalid(name, value, "an integer of at least 1")
    topic = chosen.get("topic", "")
    if not isinstance(topic, str) or not topic.isprintable():
        raise _invalid("topic", topic, "text that can be printed")
    _check_endpoint("endpoint", chosen.get("endpoint", KVEventsSettings().endpoint))
    if chosen.get("replay_endpoint") is not None:
        _check_endpoint("replay_endpoint", chosen["replay_endpoint"])
    settings = KVEventsSettings(**chosen)
    if settings.replay_endpoint == settings.endpoint:
        raise _invalid("replay_endpoint", settings.endpoint, "another address than endpoint")
    return settings if is_on and publisher != "null" else None


def _check_endpoint(name: str, value: object) -> None:
    allowed = "an address such as tcp://*:5557 or ipc:///run/quire/events"
    if not isinstance(value, str):
        raise _invalid(name, value, allowed)
    scheme, _, rest = value.partition("://")
    if scheme == "ipc" and rest:
        return
    host, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    if scheme != "tcp" or not host or not is_port:
        raise _invalid(name, value, allowed)
    if name == "endpoint" and host == "0.0.0.0":  # vLLM connects to it, and nobody hears that
        raise _invalid(name, value, f"tcp://*:{port}, which is bound")


def _invalid(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"kv_events_config has {name}={quoted(value)}. Give {allowed}.")
