"""CPU time and memory of processes of this machine, as proc(5) says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessUsage", "usage_of"]

_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21
"""Fields of /proc/PID/stat behind the name, which is in brackets."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """cpu_seconds: of all its threads since it began. resident_bytes: in memory now."""

    cpu_seconds: float = 0.0
    resident_bytes: int = 0


def usage_of(pid: int) -> ProcessUsage:
    """Return the usage of a process; zeros of one that has ended, or where there is no proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessUsage()
    found = text.rpartition(")")[2].split()
    ticks = int(found[_USER_TICKS]) + int(found[_SYSTEM_TICKS])
    return ProcessUsage(
        ticks / os.sysconf("SC_CLK_TCK"),
        int(found[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE"),
    )
