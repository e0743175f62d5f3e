"""State of processes of this machine, as proc(5) tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessState", "state_of", "unique_name"]

_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RESIDENT_PAGES = 0, 11, 12, 19, 21
"""Fields of /proc/PID/stat behind the name, which is in brackets."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """cpu_seconds: CPU time of all threads since the process began. resident_bytes: memory in use
    now. is_stopped: whether the system does not run it (SIGSTOP, a debugger)."""

    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    is_stopped: bool = False


def state_of(pid: int) -> ProcessState:
    """Return the state of a process; zeros if it has ended, or where there is no proc(5)."""
    found = _fields(pid)
    if not found:
        return ProcessState()
    ticks = int(found[_USER_TICKS]) + int(found[_SYSTEM_TICKS])
    return ProcessState(
        ticks / os.sysconf("SC_CLK_TCK"),
        int(found[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE"),
        found[_STATE] in "Tt",
    )


def unique_name(pid: int) -> str:
    """Return a name of a process that no other one has, in another container or on another machine:
    the boot of its machine, its pid, and its start. Where there is no proc(5), it is the pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    found = _fields(pid)
    return f"{boot}/{pid}/{found[_START_TICKS] if found else ''}"


def _fields(pid: int) -> list[str]:
    """Return the fields behind the name; none for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
