"""Facts of the machine, as one frozen value that a composition root passes around."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quire.base.platform import amd
from quire.base.platform.cgroups import read_group_limits
from quire.base.platform.cpu import CpuFacts, detect_cpu
from quire.base.platform.gpu import detect_gpu
from quire.base.platform.gpu_facts import GpuFacts

__all__ = ["Platform", "detect_platform"]


@dataclass(frozen=True, slots=True)
class Platform:
    """device: place of tensors and ops ("cpu", "cuda").

    memory_bytes: host memory this process may use in all. free_bytes: part of it that is free now.
    swap_bytes: swap that it may use beside it; no plan counts on any. gpu: the first one that this
    process may see, whether it is the device or not. gpu_problem: reason why no engine can compute
    on a GPU here, and what to do; None if one can. kernels: instruction sets whose compiled kernels
    run on the processor; None if nobody looked. kernels_problem: reason why none run, and
    what to do.
    """

    device: str
    system: str
    cpu: CpuFacts
    memory_bytes: int
    free_bytes: int
    swap_bytes: int = 0
    gpu: GpuFacts | None = None
    gpu_problem: str | None = None
    kernels: tuple[str, ...] | None = None
    kernels_problem: str | None = None


def detect_platform(device: str = "cpu", root: Path = Path("/")) -> Platform:
    """Facts of this machine for a worker on `device`. Never imports torch. root: the folder in
    which /proc and /sys lie."""
    memory = _memory(root)
    found = detect_gpu(search_amd=partial(amd.search_gpus, system=root / "sys"))
    return Platform(
        device=device,
        system=sys.platform,
        cpu=detect_cpu(root),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        swap_bytes=memory.swap,
        gpu=found.gpu,
        gpu_problem=found.problem,
    )


class _Memory(NamedTuple):
    total: int
    free: int
    swap: int


def _memory(root: Path) -> _Memory:
    """Bytes of host memory; a container's limits count where they are lower."""
    kib = {
        key: int(value.split()[0])
        for key, _, value in (line.partition(":") for line in _lines(root / "proc/meminfo"))
        if value.split() and value.split()[0].isdigit()
    }
    total, free, swap = (
        kib.get(name, 0) * 1024 for name in ("MemTotal", "MemAvailable", "SwapTotal")
    )
    limits = read_group_limits(root)
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes) if total else limits.memory_bytes
    if limits.free_bytes is not None:
        free = min(free, limits.free_bytes)
    if limits.swap_bytes is not None:
        swap = min(swap, limits.swap_bytes)
    return _Memory(total, free, swap)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # not Linux, or hidden
