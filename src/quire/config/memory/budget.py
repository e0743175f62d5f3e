"""Budget of an engine: kind and amount of the memory it may take."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config.memory.amounts import format_bytes
from quire.config.settings import EngineSettings

__all__ = ["MemoryBudget", "check_host_memory", "device_budget", "host_budget"]

DEFAULT_UTILIZATION = 0.9
"""The rest covers what no plan can know, such as fragmentation."""

FREE_SHARE = 0.97
"""Share of a GPU's free memory that counts, if that is less than the share of the GPU that may be
used."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """free: bytes that no program has, 0 if the machine does not say. limit: most bytes that the
    engine may take in all, None if `free` is unknown. words: description of the limit. is_shared:
    other programs of the machine need this memory too, so that the KV cache does not take all that
    is left unless told to. spare: bytes more that memory_utilization=1 would give."""

    free: int
    limit: int | None
    words: str
    is_shared: bool
    spare: int = 0


def host_budget(settings: EngineSettings, platform: Platform) -> MemoryBudget:
    """Return the budget of an engine on a CPU: a share of the free memory."""
    share, free = settings.memory_utilization or DEFAULT_UTILIZATION, platform.free_bytes
    limit = int(free * share) if free else None
    of = f"{_percent(share)} of {format_bytes(free)} free memory"
    words = f"{format_bytes(limit or 0)} that may be used ({of})"
    is_shared = settings.memory_utilization is None
    return MemoryBudget(free, limit, words, is_shared=is_shared, spare=free - (limit or 0))


def device_budget(settings: EngineSettings, total: int, free: int) -> MemoryBudget:
    """Return the budget of an engine on a GPU: a share of all its memory, or the memory that other
    programs leave. total, free: bytes of the device, 0 if it does not say."""
    if not total or not free:
        return MemoryBudget(0, None, "", is_shared=False)
    share = settings.memory_utilization or DEFAULT_UTILIZATION
    limit = int(total * share)
    words = f"{_percent(share)} of the GPU's {format_bytes(total)}"
    if free * FREE_SHARE < limit:
        limit = int(free * FREE_SHARE)
        words = f"other programs leave {format_bytes(free)} of the GPU's {format_bytes(total)}"
    words = f"{format_bytes(limit)} that may be used ({words})"
    most = min(total, int(free * FREE_SHARE))
    return MemoryBudget(free, limit, words, is_shared=False, spare=max(most - limit, 0))


def check_host_memory(swap_bytes: int, platform: Platform) -> None:
    """Check that the swap space of an engine on a GPU fits into the host's memory. Raises
    ConfigError. The swap space is pinned, so the system cannot put it anywhere else."""
    limit = int(platform.free_bytes * DEFAULT_UTILIZATION)
    if platform.free_bytes and swap_bytes > limit:
        raise ConfigError(
            f"swap_space of {format_bytes(swap_bytes)} does not fit into the host's memory, of "
            f"which {format_bytes(platform.free_bytes)} are free. Give at most "
            f"{limit // 2**20}MiB."
        )


def _percent(share: float) -> str:
    """ "90%", "0.1%": a small share by mistake must not read as nothing."""
    return f"{share * 100:g}%"
