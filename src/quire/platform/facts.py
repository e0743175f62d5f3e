"""What the machine is, as one frozen value that a composition root passes around."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from quire.platform.cpu import CpuFacts, detect_cpu
from quire.platform.gpu import detect_gpu
from quire.platform.gpu_facts import GpuFacts

__all__ = ["Platform", "detect_platform"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
_CGROUP_STAT = Path("/sys/fs/cgroup/memory.stat")
_RECLAIMABLE = ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class Platform:
    """device: where tensors live and ops run ("cpu", "cuda").

    memory_bytes: host memory this process may use in all. free_bytes: what is left of it now.
    gpu: the first one that this process may see, whether it is the device or not. gpu_problem: why
    no engine can compute on a GPU here and what to do; None if one can.
    """

    device: str
    system: str
    cpu: CpuFacts
    memory_bytes: int
    free_bytes: int
    gpu: GpuFacts | None = None
    gpu_problem: str | None = None


def detect_platform(device: str = "cpu") -> Platform:
    """Facts of this machine for a worker on `device`. Never imports torch."""
    total, free = _memory()
    found = detect_gpu()
    return Platform(
        device=device,
        system=sys.platform,
        cpu=detect_cpu(),
        memory_bytes=total,
        free_bytes=free,
        gpu=found.gpu,
        gpu_problem=found.problem,
    )


def _memory() -> tuple[int, int]:
    """Total and available host memory in bytes; a container's limit counts where it is lower."""
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in _text(_MEMINFO).splitlines())
        if value.split() and value.split()[0].isdigit()
    }
    total, free = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    limit, used = _text(_CGROUP_LIMIT), _text(_CGROUP_USED)
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit)) if total else int(limit)
        free = min(free, max(0, int(limit) - int(used) + _cached_files()))
    return total, free


def _cached_files() -> int:
    """Bytes of the container's use that hold copies of files, such as weights that were read
    before; the kernel gives them up when memory is needed."""
    lines = (line.split() for line in _text(_CGROUP_STAT).splitlines())
    return sum(int(line[1]) for line in lines if line[:1] and line[0] in _RECLAIMABLE)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # not Linux, or no such limit
