"""Facts of the machine, read from files that may be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from platform import machine

import pytest

from quire.base.errors import ConfigError
from quire.base.platform import detect_cpu, detect_platform
from quire.base.platform.cpu import HIDDEN_FLAGS_VARIABLE
from quire.config import env
from quire.ops.compile import ISAS
from tests.platform.machine_files import lay_out
from tests.waiting import WAIT_S


def test_this_machine_has_cores_and_memory() -> None:
    """Turns red when detection fails on the machine that runs the tests."""
    platform = detect_platform("cuda")
    assert platform.device == "cuda"
    assert platform.cpu.num_cores >= 1
    if platform.system == "linux":
        assert 0 < platform.free_bytes <= platform.memory_bytes


def test_unreadable_files_give_empty_facts(tmp_path: Path) -> None:
    """Turns red when a container that hides /proc stops the engine from starting."""
    platform = detect_platform(root=tmp_path)
    assert platform.cpu.features == frozenset()
    assert platform.cpu.cache_bytes == ()
    assert (platform.memory_bytes, platform.free_bytes, platform.swap_bytes) == (0, 0, 0)


@pytest.fixture
def all_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag is hidden, on whichever processor these tests are pretended to run."""
    monkeypatch.delenv(HIDDEN_FLAGS_VARIABLE, raising=False)


@pytest.mark.usefixtures("all_flags")
def test_features_and_caches_are_parsed(tmp_path: Path) -> None:
    """Turns red when a flag is found by substring (avx2 in avx512) or a cache size misread."""
    level = "sys/devices/system/cpu/cpu0/cache/index0"
    lay_out(
        tmp_path,
        {
            "proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: fma avx512f",
            f"{level}/type": "Data",
            f"{level}/level": "1",
            f"{level}/size": "48K",
        },
    )
    found = detect_cpu(tmp_path)
    assert found.model_name == "Test CPU"
    assert found.has("fma", "avx512f")
    assert not found.has("avx2")
    assert found.cache_bytes == ((1, 49152),)


def test_hidden_flags_are_absent_and_unknown_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a hidden flag is still seen, others go with it, or a typing error hides
    nothing in silence."""
    lay_out(tmp_path, {"proc/cpuinfo": "flags\t\t: fma avx512f avx512_bf16"})
    monkeypatch.setenv(HIDDEN_FLAGS_VARIABLE, "avx512_bf16,amx_tile")
    assert detect_cpu(tmp_path).features == {"fma", "avx512f"}
    env.check_kernels()
    assert set(env.KERNEL_FLAGS) == {flag for isa in ISAS for flag in isa.all_features}
    monkeypatch.setenv(HIDDEN_FLAGS_VARIABLE, "avx512_bf16,avx512-bf16")
    with pytest.raises(ConfigError, match=r"hides 'avx512-bf16', which no kernel asks for. Give "):
        env.check_kernels()


@pytest.mark.usefixtures("all_flags")
@pytest.mark.skipif(machine() != "x86_64", reason="another system call on other processors")
def test_tile_registers_that_the_system_refuses_are_told(tmp_path: Path) -> None:
    """Turns red when a container that hides AMX from its processes is planned as one that has it.
    A system refuses what its processor lacks."""
    real = detect_cpu()
    lay_out(tmp_path, {"proc/cpuinfo": "flags\t\t: avx512f amx_tile"})
    assert detect_cpu(tmp_path).tiles_refused == (real.tiles_refused or not real.has("amx_tile"))
    lay_out(tmp_path, {"proc/cpuinfo": "flags\t\t: avx512f"})
    assert not detect_cpu(tmp_path).tiles_refused


def test_platform_needs_no_torch() -> None:
    """Turns red when reading facts costs the seconds of importing torch."""
    code = "import sys, quire.base.platform; sys.exit('torch' in sys.modules)"
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
