"""Limits that Linux's control groups (cgroups) set to this process: versions 1 and 2, or both.

A group is bound by its own limits and by those of every group above it, so each is looked for from
the group of the process up to the top of what is mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["GroupLimits", "read_group_limits"]

_UNLIMITED = 2**62
"""Version 1 writes the largest number of pages where there is no limit (2**63 less a page)."""

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The least of each over all groups; None where none sets it.

    memory_bytes: most memory that may be used. free_bytes: rest of it that is free now, copies of
    files not counted as used. swap_bytes: most swap that may be used beside memory. cores: CPU time
    per time.
    """

    memory_bytes: int | None = None
    free_bytes: int | None = None
    swap_bytes: int | None = None
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    """controllers: controllers of version 1; none in version 2. top: the group that is
    mounted, at folder."""

    controllers: frozenset[str]
    top: PurePosixPath
    folder: Path


def read_group_limits(root: Path = Path("/")) -> GroupLimits:
    """Limits of this process. root: the folder in which /proc and /sys lie."""
    mounts = tuple(_mounts(root))
    found: list[GroupLimits] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            found += (_limits_v2(each) for each in _groups(mounts, "", path))
            continue
        for name in {"memory", "cpu"}.intersection(names.split(",")):
            read = _memory_v1 if name == "memory" else _cores_v1
            found += (read(each) for each in _groups(mounts, name, path))
    return _least(found)


def _least(limits: Iterable[GroupLimits]) -> GroupLimits:
    rows = [(each.memory_bytes, each.free_bytes, each.swap_bytes, each.cores) for each in limits]
    memory, free, swap, cores = (
        min((value for value in column if value is not None), default=None)
        for column in (zip(*rows, strict=True) if rows else [()] * 4)
    )
    return GroupLimits(_whole(memory), _whole(free), _whole(swap), cores)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# --- where the groups lie ------------------------------------------------------------------------


def _mounts(root: Path) -> Iterator[_Mount]:
    """proc(5): numbers, top of the mount, its place, options, optional fields, " - ", type, source,
    options of the file system."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        places, _, kind = line.partition(" - ")
        fields, system = places.split(), kind.split()
        if len(fields) < 5 or not system or system[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = system[-1].split(",") if system[0] == "cgroup" else ()
        top, place = (_unescaped(field) for field in fields[3:5])
        yield _Mount(frozenset(controllers), PurePosixPath(top), root / place.lstrip("/"))


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _groups(mounts: Iterable[_Mount], controller: str, path: str) -> Iterator[Path]:
    """Folders of the group `path` and of those above it, as far up as they are mounted. controller:
    a name of version 1, "" for version 2.

    A container sees a part of the tree. Where that part does not say where the process is (its
    group is outside of the namespace, or the mount is older), the top of the mount is the nearest
    group that is known.
    """
    group = PurePosixPath(path)
    fitting = [
        each
        for each in mounts
        if (controller in each.controllers if controller else not each.controllers)
    ]
    within = [each for each in fitting if ".." not in path and group.is_relative_to(each.top)]
    for mount in within or fitting:
        below = group.relative_to(mount.top) if within else PurePosixPath()
        yield mount.folder / below
        yield from (mount.folder / parent for parent in below.parents)


# --- what one group says -------------------------------------------------------------------------


def _limits_v2(group: Path) -> GroupLimits:
    """Above memory.high a process is slowed down until it has given memory back, which an engine
    cannot."""
    memory, free = _memory_left(
        limits=[_number(group / name) for name in ("memory.max", "memory.high")],
        used=_number(group / "memory.current"),
        cached=_sum_of(group / "memory.stat", ("active_file", "inactive_file")),
    )
    swap = _number(group / "memory.swap.max")
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return GroupLimits(memory, free, swap, _cores(quota, period))


def _memory_v1(group: Path) -> GroupLimits:
    """memory.stat names the least limit of the groups above too, of those that no mount shows as
    well."""
    stat = group / "memory.stat"
    cached = _sum_of(stat, ("total_active_file", "total_inactive_file"))
    memory, free = _memory_left(
        [_number(group / "memory.limit_in_bytes"), _sum_of(stat, ("hierarchical_memory_limit",))],
        _number(group / "memory.usage_in_bytes"),
        cached,
    )
    both, both_free = _memory_left(
        [
            _number(group / "memory.memsw.limit_in_bytes"),
            _sum_of(stat, ("hierarchical_memsw_limit",)),
        ],
        _number(group / "memory.memsw.usage_in_bytes"),
        cached,
    )
    if both is None:
        return GroupLimits(memory, free)
    # A limit of memory and swap together. Pages that are swapped already leave less for memory.
    memory = both if memory is None else min(memory, both)
    free = both_free if free is None or both_free is None else min(free, both_free)
    return GroupLimits(memory, free, both - memory)


def _cores_v1(group: Path) -> GroupLimits:
    quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return GroupLimits(cores=_cores(quota, period))


def _memory_left(
    limits: Iterable[int | None], used: int | None, cached: int | None
) -> tuple[int | None, int | None]:
    """The least limit, and what is left of it. cached: bytes of `used` that are copies of files,
    such as weights that were read before; the kernel gives them up when memory is needed."""
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not known:
        return None, None
    limit = min(known)
    return limit, min(limit, max(0, limit - (used or 0) + (cached or 0)))


def _cores(quota: str, period: str) -> float | None:
    """quota and period in microseconds; "max" and -1: none."""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _sum_of(stat: Path, names: tuple[str, ...]) -> int | None:
    """Sum the named numbers in lines of "name number"; None without any of them."""
    lines = (line.split() for line in _text(stat).splitlines())
    found = [int(line[1]) for line in lines if len(line) == 2 and line[0] in names]
    return sum(found) if found else None


def _number(path: Path) -> int | None:
    """None without a file, and of "max"."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # not Linux, hidden by the container, or no such limit
