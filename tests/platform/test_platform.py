"""Facts of the machine, read from files that may be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from platform import machine

import pytest

from quire.config import env
from quire.errors import ConfigError
from quire.platform import cpu, detect_cpu, detect_platform, facts
from tests.waiting import WAIT_S


def test_this_machine_has_cores_and_memory() -> None:
    """Turns red when detection fails on the machine that runs the tests."""
    platform = detect_platform("cuda")
    assert platform.device == "cuda"
    assert platform.cpu.num_cores >= 1
    if platform.system == "linux":
        assert 0 < platform.free_bytes <= platform.memory_bytes


def test_unreadable_files_give_empty_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns red when a container that hides /proc stops the engine from starting."""
    for name in ("_CPUINFO", "_CACHE", "_CGROUP_QUOTA"):
        monkeypatch.setattr(cpu, name, tmp_path / "missing")
    for name in ("_MEMINFO", "_CGROUP_LIMIT", "_CGROUP_USED"):
        monkeypatch.setattr(facts, name, tmp_path / "missing")
    platform = detect_platform()
    assert platform.cpu.features == frozenset()
    assert platform.cpu.cache_bytes == ()
    assert (platform.memory_bytes, platform.free_bytes) == (0, 0)


def test_a_container_limits_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a container of 1 core and 1 GiB is planned as the whole machine."""
    stat = "anon 3741824\nfile 70000000\nactive_file 30000000\ninactive_file 40000000"
    texts = {"quota": "150000 100000", "limit": "1073741824", "used": "273741824", "stat": stat}
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cpu, "_CGROUP_QUOTA", tmp_path / "quota")
    monkeypatch.setattr(facts, "_CGROUP_LIMIT", tmp_path / "limit")
    monkeypatch.setattr(facts, "_CGROUP_USED", tmp_path / "used")
    monkeypatch.setattr(facts, "_CGROUP_STAT", tmp_path / "stat")
    monkeypatch.setattr(facts, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n")
    assert detect_cpu().num_cores == 1
    platform = detect_platform()
    assert platform.memory_bytes == 2**30
    assert platform.free_bytes == 870_000_000  # cached files are as good as free


def test_features_and_caches_are_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns red when a flag is found by substring (avx2 in avx512) or a cache size misread."""
    (tmp_path / "cpuinfo").write_text("model name\t: Test CPU\nflags\t\t: fma avx512f\n")
    level = tmp_path / "cache" / "index0"
    level.mkdir(parents=True)
    for name, text in (("type", "Data"), ("level", "1"), ("size", "48K")):
        (level / name).write_text(text + "\n")
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "_CACHE", tmp_path / "cache")
    found = detect_cpu()
    assert found.model_name == "Test CPU"
    assert found.has("fma", "avx512f")
    assert not found.has("avx2")
    assert found.cache_bytes == ((1, 49152),)


@pytest.mark.skipif(machine() != "x86_64", reason="another system call on other processors")
def test_tile_registers_that_the_system_refuses_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a container that hides AMX from its processes is planned as one that has it.
    A system refuses what its processor lacks."""
    real = detect_cpu()
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx512f amx_tile\n")
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    assert detect_cpu().tiles_refused == (real.tiles_refused or not real.has("amx_tile"))
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx512f\n")
    assert not detect_cpu().tiles_refused


def test_platform_needs_no_torch() -> None:
    """Turns red when reading facts costs the seconds of importing torch."""
    code = "import sys, quire.platform; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_the_forced_isa_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a misspelt QUIRE_CPU_ISA is ignored."""
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    assert env.cpu_isa() is None
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    assert env.cpu_isa() == "avx2"
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx1024")
    with pytest.raises(ConfigError, match=r"QUIRE_CPU_ISA.*'avx1024'.*Unset it"):
        env.cpu_isa()
