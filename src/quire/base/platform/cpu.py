"""Facts of the processor: instruction sets, usable cores, cache sizes. Reads Linux's own files."""

from __future__ import annotations

import ctypes
import os
import platform as host
from dataclasses import dataclass
from pathlib import Path

from quire.base.platform.cgroups import read_group_limits

__all__ = ["HIDDEN_FLAGS_VARIABLE", "CpuFacts", "detect_cpu"]

HIDDEN_FLAGS_VARIABLE = "QUIRE_HIDDEN_CPU_FLAGS"
"""Variable with flags of the processor to take for absent, separated by commas. Processes that are
started later inherit it, so a whole engine behaves as on a lesser processor."""

_FLAG_KEYS = ("flags", "Features")  # x86 and Arm name the same line differently
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # as in csrc/native/processor.cpp


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """architecture: name in the kernel (x86_64, aarch64). features: the kernel's flag names.

    num_cores: cores that this process may use (affinity and container quota respected).
    cache_bytes: data or unified cache size by level, of the first core; empty when unknown.
    tiles_refused: whether the processor has tile registers that the system keeps from this process.
    """

    architecture: str
    model_name: str
    features: frozenset[str]
    num_cores: int
    cache_bytes: tuple[tuple[int, int], ...]
    tiles_refused: bool = False

    def has(self, *features: str) -> bool:
        """True when the processor has every named feature."""
        return self.features.issuperset(features)


def detect_cpu(root: Path = Path("/")) -> CpuFacts:
    """Read this machine's processor, less the flags in `HIDDEN_FLAGS_VARIABLE`. Unknown facts are
    empty, never guessed. root: the folder in which /proc and /sys lie."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    hidden = frozenset(os.environ.get(HIDDEN_FLAGS_VARIABLE, "").split(","))
    features = frozenset((_cpuinfo_value(lines, _FLAG_KEYS) or "").split()) - hidden
    return CpuFacts(
        architecture=host.machine(),
        model_name=_cpuinfo_value(lines, ("model name", "Model")) or host.processor(),
        features=features,
        num_cores=_usable_cores(read_group_limits(root).cores),
        cache_bytes=_caches(root / "sys/devices/system/cpu/cpu0/cache"),
        tiles_refused="amx_tile" in features and _refuses_tiles(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # not Linux, or hidden by the container: the fact is unknown


def _cpuinfo_value(lines: list[str], keys: tuple[str, ...]) -> str | None:
    for line in lines:
        key, separator, value = line.partition(":")
        if separator and key.strip() in keys:
            return value.strip()
    return None


def _usable_cores(quota: float | None) -> int:
    """quota: cores' worth of time that the process may have; None for all."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return cores if quota is None else min(cores, max(1, int(quota)))


def _refuses_tiles() -> bool:
    """Asks for them as the kernels do when they are loaded; asking twice changes nothing."""
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes, syscall.restype = (ctypes.c_long,) * 3, ctypes.c_long
    return syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0


def _caches(root: Path) -> tuple[tuple[int, int], ...]:
    found: dict[int, int] = {}
    for index in sorted(root.glob("index*")):
        if _read(index / "type") in ("Data", "Unified"):
            level, size = _read(index / "level"), _read(index / "size")
            if level.isdigit() and size.endswith("K") and size[:-1].isdigit():
                found[int(level)] = int(size[:-1]) * 1024
    return tuple(sorted(found.items()))
