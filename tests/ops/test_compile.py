"""Compiling the kernels: what is built, what is told apart, what happens without a compiler."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import WAIT_S

from quire.ops.compile import ISAS, SOURCE_FOLDER, CompileError, build_hash, compile_kernels
from quire.ops.compile.__main__ import main

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine

AVX2 = next(isa for isa in ISAS if isa.name == "avx2")


def test_the_hash_changes_with_any_source(tmp_path: Path) -> None:
    """Turns red when a changed kernel is served by a library built from the old one."""
    shutil.copytree(SOURCE_FOLDER, tmp_path, dirs_exist_ok=True)
    before = build_hash(AVX2, tmp_path)
    assert before == build_hash(AVX2)
    changed = tmp_path / "native/simd.h"
    changed.write_text(changed.read_text() + "// changed\n")
    assert build_hash(AVX2, tmp_path) != before


def test_each_instruction_set_has_its_own_hash() -> None:
    """Turns red when a library of one instruction set passes for another."""
    assert len({build_hash(isa) for isa in ISAS}) == len(ISAS)


def test_the_hash_changes_with_what_is_compiled_anew() -> None:
    """Turns red when a library stays in use that has a source file without its instructions."""
    isa = next(isa for isa in ISAS if isa.units)
    assert build_hash(replace(isa, units=())) != build_hash(isa)


def test_without_a_compiler_the_reason_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a machine without a compiler gets a traceback instead of a sentence."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        compile_kernels(tmp_path)
    assert main(["--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kernels not compiled: ")
    assert error.count("\n") == 1


def test_a_failed_compile_leaves_the_old_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a broken source removes the kernels that worked."""
    sources, output = tmp_path / "sources", tmp_path / "lib"
    sources.mkdir()
    output.mkdir()
    old = output / "libquire_avx2.so"
    old.write_bytes(b"old")
    (sources / "broken.cpp").write_text("this is not C++\n")
    with pytest.raises(CompileError):
        compile_kernels(output, sources=sources)
    assert old.read_bytes() == b"old"


def test_sets_that_are_done_outlast_one_that_fails(tmp_path: Path) -> None:
    """Turns red when an install that is interrupted has to begin anew."""
    sources, output, told = tmp_path / "sources", tmp_path / "lib", list[str]()
    sources.mkdir()
    source = "#ifdef __AVX512F__\n#error here\n#endif\nint one() { return 1; }\n"
    (sources / "one.cpp").write_text(source)
    with pytest.raises(CompileError, match="here"):
        compile_kernels(output, sources=sources, isas=["avx512", "avx2"], report=told.append)
    assert told == ["compiled the kernels for avx2 (1 of 2)"]
    assert [path.name for path in output.iterdir()] == ["libquire_avx2.so"]


def test_a_library_of_the_same_sources_is_kept(tmp_path: Path) -> None:
    """Turns red when an install compiles what is there, or keeps what is of other sources."""
    sources, output = tmp_path / "sources", tmp_path / "lib"
    sources.mkdir()
    info = sources / "build_info.cpp"
    info.write_text('extern "C" const char* hash() { return QUIRE_BUILD_HASH; }\n')
    libraries = compile_kernels(output, sources=sources)

    def recompiled() -> list[bool]:
        before = [library.stat().st_mtime_ns for library in libraries]
        assert compile_kernels(output, sources=sources, keep_current=True) == libraries
        times = zip(libraries, before, strict=True)
        return [library.stat().st_mtime_ns > at for library, at in times]

    assert not any(recompiled())
    libraries[0].write_bytes(b"of other sources")
    assert recompiled() == [True, *[False] * (len(libraries) - 1)]
    info.write_text(info.read_text() + "// changed\n")
    assert all(recompiled())


def test_the_build_file_needs_neither_torch_nor_the_package() -> None:
    """Turns red when installing quire needs what is installed only afterwards."""
    spec = importlib.util.find_spec("quire.ops.compile.build")
    assert spec is not None and spec.origin is not None
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('build', {spec.origin!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['build'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert module.SOURCE_FOLDER.is_dir()\n"
        "assert 'torch' not in sys.modules and 'quire' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=WAIT_S)
