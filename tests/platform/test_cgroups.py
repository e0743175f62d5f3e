"""Limits of containers and services, from trees of control groups as systems lay them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.base.platform import detect_cpu, detect_platform
from quire.base.platform.cgroups import GroupLimits, read_group_limits
from quire.bundled import bundled_model_path
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from tests.platform.machine_files import lay_out

GIB = 2**30
NO_LIMIT_V1 = "9223372036854771712"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\nSwapTotal: 8388608 kB"


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A machine of 16 GiB. files: below /sys/fs/cgroup."""
    proc = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, "proc/meminfo": MEMINFO}
    lay_out(root, {**proc, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    return root


def memory(root: Path) -> tuple[int, int]:
    platform = detect_platform(root=root)
    return platform.memory_bytes, platform.free_bytes


def test_a_container_of_version_2_is_a_namespace_of_its_own(tmp_path: Path) -> None:
    """Turns red when a container of 1 core and 1 GiB is planned as the whole machine, or copies of
    files count as used."""
    stat = "anon 3741824\nfile 70000000\nactive_file 30000000\ninactive_file 40000000"
    files = {
        "memory.max": "1073741824",
        "memory.current": "273741824",
        "memory.stat": stat,
        "cpu.max": "150000 100000",
    }
    machine(tmp_path, "0::/", V2, files)
    assert memory(tmp_path) == (GIB, 870_000_000)
    assert detect_cpu(tmp_path).num_cores == 1


@pytest.mark.parametrize("limited", ["system.slice/quire.service", "system.slice", "."])
@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_a_service_is_bound_by_each_group_above_it(tmp_path: Path, limited: str, name: str) -> None:
    """Turns red when MemoryMax= or MemoryHigh= of a unit, or of the slice it is in, is not seen."""
    files = {
        "system.slice/quire.service/memory.max": "max",
        "system.slice/quire.service/memory.current": "0",
        "system.slice/memory.max": "max",
        f"{limited}/{name}": str(GIB),
        f"{limited}/memory.current": str(GIB // 4),
    }
    machine(tmp_path, "0::/system.slice/quire.service", V2, files)
    assert memory(tmp_path) == (GIB, GIB * 3 // 4)


def test_the_least_of_all_groups_counts_for_each_limit(tmp_path: Path) -> None:
    """Turns red when the innermost limit hides a lower one outside, or the least limit the group
    that has the least left."""
    files = {
        "a/b/memory.max": str(2 * GIB),
        "a/b/memory.current": "0",
        "a/memory.max": str(3 * GIB),
        "a/memory.current": str(2 * GIB),
        "a/b/memory.swap.max": "max",
        "a/memory.swap.max": str(GIB),
        "a/b/cpu.max": "400000 100000",
        "a/cpu.max": "250000 100000",
    }
    root = machine(tmp_path, "0::/a/b", V2, files)
    assert read_group_limits(root) == GroupLimits(2 * GIB, GIB, GIB, 2.5)
    assert detect_platform(root=root).swap_bytes == GIB


@pytest.mark.parametrize(
    ("path", "top", "below"),
    [
        ("/docker/1f", "/docker/1f", ""),  # a container that sees the names of the host
        ("/", "/", ""),  # one in a namespace of its own
        ("/docker/1f", "/", "docker/1f/"),  # the host itself, or a container with all of its tree
        ("/docker/1f/app", "/docker/1f", "app/"),
        ("/kubepods/pod7/c9", "/docker/1f", ""),  # a container in a container: no mount names it
        ("/../other", "/", ""),  # moved out of the namespace
        ("/", "/../..", ""),  # mounted before the namespace was made
    ],
)
def test_docker_on_version_1(tmp_path: Path, path: str, top: str, below: str) -> None:
    """Turns red when `docker run --memory 1g --cpus 1.5` is planned as the whole machine."""
    files = {
        f"memory/{below}memory.limit_in_bytes": str(GIB),
        f"memory/{below}memory.usage_in_bytes": str(GIB // 2),
        f"memory/{below}memory.stat": f"cache 9\ntotal_inactive_file {GIB // 8}\ninactive_file 1",
        f"cpu,cpuacct/{below}cpu.cfs_quota_us": "150000",
        f"cpu,cpuacct/{below}cpu.cfs_period_us": "100000",
    }
    groups = f"5:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:{path}"
    mounts = "\n".join(mount.format(top=top) for mount in (V1_CPU, V1_MEMORY))
    machine(tmp_path, groups, mounts, files)
    assert memory(tmp_path) == (GIB, GIB * 5 // 8)
    assert read_group_limits(tmp_path).cores == 1.5
    assert detect_cpu(tmp_path).num_cores == 1


def test_version_1_without_limits_has_none(tmp_path: Path) -> None:
    """Turns red when the number that stands for no limit is taken for one."""
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": str(GIB),
        "memory/memory.memsw.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.stat": f"hierarchical_memory_limit {NO_LIMIT_V1}",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    mounts = "\n".join(mount.format(top="/") for mount in (V1_CPU, V1_MEMORY))
    machine(tmp_path, "5:cpu,cpuacct:/\n4:memory:/", mounts, files)
    assert read_group_limits(tmp_path) == GroupLimits()
    assert memory(tmp_path) == (16 * GIB, 16 * GIB)


def test_version_1_tells_of_limits_above_what_is_mounted(tmp_path: Path) -> None:
    """Turns red when a pod's limit is not seen from a container of it, or a full swap leaves as
    much for memory as an empty one."""
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": "0",
        "memory/memory.stat": f"hierarchical_memory_limit {GIB}",
    }
    machine(tmp_path, "4:memory:/pod/c", V1_MEMORY.format(top="/pod/c"), files)
    assert memory(tmp_path) == (GIB, GIB)
    swap = {
        "memory/memory.memsw.limit_in_bytes": str(GIB * 5 // 4),
        "memory/memory.memsw.usage_in_bytes": str(GIB),
    }
    lay_out(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in swap.items()})
    assert read_group_limits(tmp_path) == GroupLimits(GIB, GIB // 4, GIB // 4)


def test_both_versions_at_once(tmp_path: Path) -> None:
    """Turns red when a hybrid system (systemd's default for years) is read by one version alone.
    Mount points may have spaces."""
    files = {
        "memory/user.slice/memory.limit_in_bytes": str(2 * GIB),
        "memory/user.slice/memory.usage_in_bytes": "0",
        "uni fied/user.slice/cpu.max": "100000 100000",
        "uni fied/user.slice/memory.max": str(4 * GIB),
    }
    unified = "40 31 0:38 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw"
    mounts = "\n".join([V1_MEMORY.format(top="/"), unified])
    groups = "4:memory:/user.slice/session\n1:name=systemd:/x\n0::/user.slice/session"
    machine(tmp_path, groups, mounts, files)
    assert memory(tmp_path) == (2 * GIB, 2 * GIB)
    assert detect_cpu(tmp_path).num_cores == 1


def test_another_containers_mount_is_not_this_ones_group(tmp_path: Path) -> None:
    """Turns red when a process that watches containers is bound by their limits."""
    other = "41 31 0:32 /docker/2e /watched rw - cgroup cgroup rw,memory"
    mounts = "\n".join([other, V1_MEMORY.format(top="/docker/1f")])
    files = {"memory/memory.limit_in_bytes": str(2 * GIB)}
    machine(tmp_path, "4:memory:/docker/1f", mounts, files)
    lay_out(tmp_path, {"watched/memory.limit_in_bytes": str(GIB)})
    assert memory(tmp_path) == (2 * GIB, 2 * GIB)


@pytest.mark.parametrize("text", ["", "max", "garbage", "max 100000", "100000", "1 0", "-1 100000"])
def test_a_limit_without_a_meaning_is_none(tmp_path: Path, text: str) -> None:
    """Turns red when a file of another kernel stops the start."""
    files = {"memory.max": text, "cpu.max": text, "memory.stat": f"active_file\n{text}"}
    machine(tmp_path, "0::/gone/a\nbroken\n", f"broken\n{V2}\n1 2 - cgroup2", files)
    assert detect_cpu(tmp_path).num_cores == len(os.sched_getaffinity(0))
    limits = read_group_limits(tmp_path)
    assert (limits.memory_bytes is None) == (text != "100000")
    assert limits.cores is None


def test_the_plan_takes_memory_and_threads_from_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when 16 GiB are planned under a limit of 1 GiB, or a quota of one core does not
    bound OMP_NUM_THREADS, which is often set for the whole machine."""
    files = {
        "memory/memory.limit_in_bytes": str(GIB),
        "memory/memory.usage_in_bytes": "0",
        "cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    mounts = "\n".join(mount.format(top="/") for mount in (V1_CPU, V1_MEMORY))
    platform = detect_platform(root=machine(tmp_path, "5:cpu,cpuacct:/\n4:memory:/", mounts, files))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    settings = EngineSettings(model=str(bundled_model_path()), memory_utilization=1.0)
    resolved = plan_startup(settings, platform).resolved
    assert resolved.memory.free == GIB
    assert resolved.memory.total <= GIB
    assert resolved.settings.num_threads == 1
