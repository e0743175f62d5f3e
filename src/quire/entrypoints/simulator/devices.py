"""Devices by name, with the constants of `devices.json`, each of which names its source there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from quire.base.errors import ConfigError
from quire.base.foreign import nearest

__all__ = ["CONSTANTS", "Device", "device_named", "device_names"]

CONSTANTS = (
    "bytes_per_s", "flop_per_s", "read_share", "arithmetic_share", "link_bytes_per_s",
    "host_bytes_per_s", "launch_s", "all_reduce_s", "copy_call_s", "load_latency_s",
)  # fmt: skip
"""The constants that decide how long a step of a GPU takes."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that computes.

    bytes_per_s, flop_per_s: peaks of its memory and of its products of 16-bit numbers. read_share,
        arithmetic_share: shares of these peaks that kernels reach.
    overlaps: whether it reads and multiplies at the same time, or one after the other.
    link_bytes_per_s: rate to devices beside it, in one direction. host_bytes_per_s: rate to the
        host's memory, in one direction.
    launch_s: time between two kernels. all_reduce_s: time of an exchange of nothing. copy_call_s:
        time of one call that copies to or from the host.
    host_change_s, host_enter_s: host time where the device itself is the host, 0 where it hides
        behind the step before. The first is between two kernels of a step whose rows change, beside
        `launch_s`; the second is for each sequence that enters.
    load_latency_s: latency of one load from its memory. max_warps: groups of threads that wait for
        loads at the same time.
    """

    name: str
    title: str
    memory_bytes: int
    bytes_per_s: float
    flop_per_s: float
    read_share: float
    arithmetic_share: float
    overlaps: bool
    link_bytes_per_s: float
    host_bytes_per_s: float
    launch_s: float
    all_reduce_s: float
    copy_call_s: float
    host_change_s: float
    host_enter_s: float
    load_latency_s: float
    max_warps: int

    def scaled(self, constant: str, factor: float) -> Device:
        """Return the device with one of `CONSTANTS` changed, to see what depends on it."""
        return replace(self, **{constant: getattr(self, constant) * factor})


def device_names() -> tuple[str, ...]:
    """Return the names of all devices that are known."""
    return tuple(_table())


def device_named(name: str) -> Device:
    """Return a device. ConfigError, naming the nearest, if there is none of this name."""
    table = _table()
    if name not in table:
        near = nearest(name, list(table))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"Device {name!r} is not known{hint} Give one of: {', '.join(table)}.")
    values = {key: value for key, value in table[name].items() if key != "sources"}
    return Device(name=name, **values)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = (files("quire.entrypoints.simulator") / "devices.json").read_text(encoding="utf-8")
    return json.loads(text)
