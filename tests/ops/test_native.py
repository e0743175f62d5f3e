"""Loading the compiled libraries, and what they report."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops.compile import SOURCE_FOLDER
from quire.ops.native import binding as native

PLATFORM = detect_platform()


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
    with pytest.raises(EngineError, match=r"activation failed with code 1.*QUIRE_CPU_ISA=none"):
        library.call("activation", None, None, 1, 0, unknown_dtype)


def test_parameters_come_from_the_source() -> None:
    """Fault: a parameter is passed as another type than the kernel has, or a kernel is missed."""
    source = """
    QUIRE_API int quire_scale(const float* x, void *out,
                              int64_t count, int32_t dtype, float by,
                              quire::Team* team) {
    """
    pointer, wide, narrow, real = (
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float,
    )  # fmt: skip
    assert native.read_signatures(source) == {"scale": (pointer, pointer, wide, narrow, real)}
    with pytest.raises(EngineError, match=r"scale.*'double by'.*int64_t"):
        native.read_signatures(source.replace("float by", "double by"))


def test_every_exported_kernel_has_parameters() -> None:
    """Fault: a spelling of an export that the reader does not know."""
    text = "".join(path.read_text() for path in SOURCE_FOLDER.rglob("*.cpp"))
    exported = set(re.findall(r"QUIRE_API int quire_(\w+)\(", text)) - {"replay"}
    assert exported == set(native.read_signatures(text))
