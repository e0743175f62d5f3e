"""The compiled libraries in a process: they share torch's OpenMP runtime and its threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import EngineError
from quire.ops import ALL_OPS, native
from quire.platform import detect_platform

PLATFORM = detect_platform()

ONE_RUNTIME = """
import os
import torch
from quire.ops import build_op_set
from quire.ops.native import mapped_openmp_runtimes
from quire.platform import detect_platform

torch.set_num_threads(2)
ops = build_op_set(detect_platform())
assert ops.chosen["rms_norm"].startswith("cpu_"), ops.chosen
x = torch.randn(4096, 1024)
torch.mm(x, x.T)
before = len(os.listdir("/proc/self/task"))
ops.rms_norm(x, x[0], 1e-6)
after = len(os.listdir("/proc/self/task"))
runtimes = mapped_openmp_runtimes()
assert len(runtimes) == 1, runtimes
assert after == before, (before, after)
print("one runtime, one team")
"""


def test_the_process_has_one_openmp_runtime_and_one_team() -> None:
    """Turns red when the library is linked with a runtime of its own: two teams then fight for the
    cores, and torch's thread count does not hold for the kernels."""
    reason = ALL_OPS["rms_norm"].providers[0].unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-c", ONE_RUNTIME], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "one runtime, one team" in result.stdout


def test_a_stale_or_missing_library_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a library built from other sources computes wrong numbers in silence."""
    reason = native.native_unavailable("avx2", PLATFORM)
    if reason is not None:
        pytest.skip(reason)
    fresh = native._open.__wrapped__  # past the cache, which holds the good library
    monkeypatch.setattr(native, "build_hash", lambda isa: "other")
    assert "compiled from other sources; run python -m quire.ops.compile" in fresh("avx2")
    assert "plain torch instead of avx2 kernels" in caplog.text
    monkeypatch.setattr(native, "library_path", lambda isa: tmp_path / "missing.so")
    assert "not compiled at install; run python -m quire.ops.compile" in fresh("avx2")


def test_a_failing_kernel_raises() -> None:
    """Turns red when a kernel's error code is dropped and garbage is returned."""
    reason = native.native_unavailable("avx2", PLATFORM)
    if reason is not None:
        pytest.skip(reason)
    library = native.load_native("avx2")
    unknown_dtype = 9
    with pytest.raises(EngineError, match=r"silu_and_mul failed with code 1.*QUIRE_CPU_ISA=none"):
        library.call("silu_and_mul", None, 0, None, 0, 0, unknown_dtype, 1)
