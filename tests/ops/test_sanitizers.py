"""The C++ kernels under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ops.tile_emulator import AMX, tiles_unavailable
from tests.profiles import SCALE

from quire.base.platform import detect_platform
from quire.ops.compile import ISAS, build

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine

CPU = detect_platform().cpu
RUNNABLE = [
    isa.name
    for isa in ISAS
    if CPU.architecture in isa.architectures and all(map(CPU.has, isa.all_features))
]
ISA_NAMES = RUNNABLE if SCALE > 1 else [*RUNNABLE[:1], *RUNNABLE[1:][-1:]]
"""All in a soak; else the widest, which holds objects of most others, and the narrowest, since each
takes a minute to compile."""

PREPARE = """
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
from quire.ops import ALL_OPS, check_provider
from quire.ops.native import binding as native
from quire.ops.compile import library_path
from quire.ops.native.team import Team
from quire.base.platform import detect_platform

folder = Path(sys.argv[1])
setattr(native, "library_path", partial(library_path, folder=folder))
platform = detect_platform()
torch.set_num_threads(1)  # the references': two teams would spin against each other
compiled = [
    (op, provider)
    for op in ALL_OPS.values()
    for provider in op.providers
    if provider.name.removeprefix("cpu_") in sys.argv[2:]
]
"""

CHECK_ALL = """
checked, team = 0, Team(2)
for op, provider in compiled:
    reason = provider.unavailable(platform)
    assert reason is None, f"{provider.name}: {reason}"
    report = check_provider(op, replace(provider, load=partial(provider.load, team=team)))
    assert report.ok, report.failures
    checked += report.num_cases
print("checked", checked)
"""

OF_VENDORS = """
compiled = [(op, provider) for op, provider in compiled if op.name in (
    "linear", "linear_int8", "linear_int4", "paged_attention")]
"""
"""Keeps operations whose computation depends on the processor's vendor (csrc/native/vendor.h)."""

CHECK_TILES = """
from tests.ops.tile_emulator import (
    AMX, TILE_ATTENTION, TILE_OPS, build_emulator, emulation, tile_provider, tile_weights
)

library = library_path(AMX, folder)
with emulation(build_emulator(folder)) as emulator:
    checked = 0
    for op in (*TILE_OPS, TILE_ATTENTION):
        provider = tile_provider(op, library)
        report = check_provider(op, replace(provider, load=partial(provider.load, team=Team(2))))
        assert report.ok, report.failures
        checked += report.num_cases
        if op is TILE_ATTENTION:
            continue
        # The last tile of each has three rows fewer than the registers are configured for.
        matrix = provider.load()(*tile_weights(op, torch.Generator().manual_seed(0), 33, 1024))
        for rows in (61, 93, 125):
            matrix(torch.ones(rows, 1024, dtype=torch.bfloat16))
print("checked", checked)
"""

READ_BEYOND = """
provider = next(provider for op, provider in compiled if op.name == "activation_and_mul")
x = torch.ones(64, 256)
x.untyped_storage().resize_(1024)
provider.load()(x, "silu")
"""
"""The tensor says 64 KiB; its memory has become 1 KiB, and what it was before is freed."""


@pytest.fixture(scope="module")
def sanitizer_runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shared library that must be loaded before Python; skips when the compiler has none."""
    folder = tmp_path_factory.mktemp("probe")
    try:
        compiler = build.find_compiler()
    except build.CompileError as error:
        pytest.skip(str(error))
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [*compiler, *build._SANITIZE_FLAGS, str(source), "-o", str(folder / "probe")]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if probe.returncode != 0:
        pytest.skip(f"{compiler[0]} has no sanitizers: {probe.stderr.strip()[-200:]}")
    is_clang = any("clang" in Path(word).name for word in compiler)
    name = "libclang_rt.asan-x86_64.so" if is_clang else "libasan.so"
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler[0]} has no shared {name}")
    return found


@pytest.fixture(scope="module")
def sanitized_kernels(sanitizer_runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries of `ISA_NAMES`, and that for tiles if they can be emulated."""
    if not ISA_NAMES:
        pytest.skip(f"no kernels for this processor, {CPU.architecture}")
    folder = tmp_path_factory.mktemp("sanitized")
    emulated = () if tiles_unavailable() else (AMX.name,)
    build.compile_kernels(folder, isas=[*ISA_NAMES, *emulated], sanitize=True)
    return folder


def run_sanitized(
    script: str, runtime: str, kernels: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own. Leaks are not looked for: Python and torch keep memory for good."""
    names = [name for name in ISA_NAMES if (kernels / f"libquire_{name}.so").exists()]
    options = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [sys.executable, "-c", PREPARE + script, str(kernels), *names],
        env={**os.environ, **options, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],  # where `tests` is found
    )


def test_every_kernel_runs_clean(sanitizer_runtime: str, sanitized_kernels: Path) -> None:
    """Turns red when a kernel touches memory outside its tensors, or computes what C++ leaves
    undefined: a misaligned load, an overflowing index, a shift too far."""
    result = run_sanitized(CHECK_ALL, sanitizer_runtime, sanitized_kernels)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "runtime error" not in result.stderr, result.stderr[-4000:]
    assert int(result.stdout.split()[-1]) > 0


def test_the_way_of_other_vendors_runs_clean(
    sanitizer_runtime: str, sanitized_kernels: Path
) -> None:
    """Turns red when kernels are wrong, or touch memory outside their tensors, on processors of a
    vendor that is not this one's."""
    script = OF_VENDORS + CHECK_ALL
    result = run_sanitized(script, sanitizer_runtime, sanitized_kernels, QUIRE_OTHER_VENDOR="1")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "runtime error" not in result.stderr, result.stderr[-4000:]
    assert int(result.stdout.split()[-1]) > 0


def test_kernels_on_tiles_run_clean(sanitizer_runtime: str, sanitized_kernels: Path) -> None:
    """Turns red when a tile is loaded from beyond its rows, its panel or the scratch memory."""
    if (reason := tiles_unavailable()) is not None:
        pytest.skip(reason)
    result = run_sanitized(CHECK_TILES, sanitizer_runtime, sanitized_kernels)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "runtime error" not in result.stderr, result.stderr[-4000:]
    assert int(result.stdout.split()[-1]) > 0


def test_a_read_beyond_a_tensor_is_seen(sanitizer_runtime: str, sanitized_kernels: Path) -> None:
    """Turns red when the sanitizers are not in force, so that the test above cannot fail."""
    result = run_sanitized(READ_BEYOND, sanitizer_runtime, sanitized_kernels)
    assert result.returncode != 0
    assert "ERROR: AddressSanitizer: heap-" in result.stderr
