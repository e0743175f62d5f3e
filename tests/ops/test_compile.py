"""Compiling the kernels: the libraries that are built, the sources that are told apart, the end
without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.platform.machine_files import lay_out
from tests.waiting import WAIT_S

from quire.base.platform.cpu import detect_cpu
from quire.ops.compile import ISAS, SOURCE_FOLDER, CompileError, build, build_hash, compile_kernels
from quire.ops.compile.__main__ import main

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine

AVX2 = next(isa for isa in ISAS if isa.name == "avx2")
ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the smallest source of kernels. Each set compiles it for itself."""
    monkeypatch.delenv("QUIRE_KERNEL_SETS", raising=False)
    folder = tmp_path / "sources"
    folder.mkdir()
    source = 'extern "C" const char* hash() { return QUIRE_BUILD_HASH; }\n'
    (folder / "build_info.cpp").write_text(source)
    return folder


@pytest.fixture
def old_assembler(tmp_path: Path) -> Path:
    """A compiler whose assembler does not know tiles. The space in its name belongs to it."""
    script = tmp_path / "old assembler"
    script.write_text(
        '#!/bin/sh\ncase " $* " in *" -E "*) ;; *-mamx-*)'
        " echo 'Error: no such instruction: ldtilecfg' >&2; exit 1 ;; esac\n"
        'exec c++ "$@"\n'
    )
    script.chmod(0o755)
    return script


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


def test_by_hand_the_sets_that_fail_are_named_and_the_others_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a script takes a part for the whole."""

    def compile_some(output: Path, **options: object) -> None:
        raise CompileError("amx: c++ failed", (output / "one.so",))

    monkeypatch.setattr("quire.ops.compile.__main__.compile_kernels", compile_some)
    assert main(["--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'one.so'}\n"
    assert printed.err == "some kernels not compiled: amx: c++ failed\n"


def test_a_failed_compile_leaves_the_old_library(sources: Path, tmp_path: Path) -> None:
    """Turns red when a broken source removes the kernels that worked."""
    output = tmp_path / "lib"
    output.mkdir()
    old = output / "libquire_avx2.so"
    old.write_bytes(b"old")
    (sources / "broken.cpp").write_text("this is not C++\n")
    with pytest.raises(CompileError) as caught:
        compile_kernels(output, sources=sources)
    assert old.read_bytes() == b"old"
    assert caught.value.libraries == ()


def test_a_set_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    """Turns red when one compiler that the system kills costs an install all kernels, or when one
    that is interrupted has to begin anew."""
    sources, output, told = tmp_path / "sources", tmp_path / "lib", list[str]()
    sources.mkdir()
    # Compiled anew for avx512_vnni, by its name.
    (sources / "paged_attention.cpp").write_text(
        "#if defined(__AVX512F__) && !defined(__AVX512VNNI__)\n#error here\n#endif\n"
    )
    isas = ["avx512_vnni", "avx512", "avx2"]
    with pytest.raises(CompileError, match=r"^avx512: .*here") as caught:
        compile_kernels(output, sources=sources, isas=isas, report=told.append)
    made = [output / "libquire_avx512_vnni.so", output / "libquire_avx2.so"]
    assert caught.value.libraries == tuple(made)
    assert sorted(output.iterdir()) == sorted(made)
    assert told[::2] == [f"compiled the kernels for {isas[at]} ({3 - at} of 3)" for at in (2, 0)]
    assert told[1].startswith("no kernels for avx512: ") and "here" in told[1]


def test_sets_that_the_assembler_does_not_know_are_left_out(
    sources: Path, old_assembler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when an assembler that is older than the compiler counts as a failure."""
    monkeypatch.setenv("CXX", str(old_assembler))
    told = list[str]()
    [library] = compile_kernels(
        tmp_path / "lib", sources=sources, isas=["amx", "avx2"], report=told.append
    )
    assert library.name == "libquire_avx2.so"
    assert told[0].startswith("no kernels for amx: ") and "assembler" in told[0]
    with pytest.raises(CompileError, match=r"^amx: .*does not know"):
        compile_kernels(tmp_path / "no folder", sources=sources, isas=["amx"])
    assert not (tmp_path / "no folder").exists()


@pytest.mark.parametrize("command", ["env c++", "c++ -pipe", "'{}' -pipe", "  "])
def test_the_compiler_may_have_arguments(
    command: str,
    sources: Path,
    old_assembler: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Turns red when `CXX="ccache g++"` counts as no compiler."""
    monkeypatch.setenv("CXX", command.format(old_assembler))
    assert len(compile_kernels(tmp_path / "lib", sources=sources, isas=["avx2"])) == 1


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ("", [isa.name for isa in ISAS]),
        ("all", [isa.name for isa in ISAS]),
        ("avx2, avx512", ["avx512", "avx2"]),
        ("native", ["avx512", "avx2"]),
    ],
)
def test_the_sets_to_compile_may_be_chosen(
    choice: str,
    made: list[str],
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Turns red when an install for one processor compiles what others run, or less than its own
    runs; or when sets that the caller names are left out."""
    avx512 = next(isa for isa in ISAS if isa.name == "avx512")
    facts = replace(detect_cpu(), features=frozenset(avx512.features))
    monkeypatch.setattr(build, "detect_cpu", lambda: facts)
    monkeypatch.setenv("QUIRE_KERNEL_SETS", choice)
    libraries = compile_kernels(tmp_path / "lib", sources=sources)
    assert [path.stem.removeprefix("libquire_") for path in libraries] == made
    [named] = compile_kernels(tmp_path / "named", sources=sources, isas=["avx512_vnni"])
    assert named.stem == "libquire_avx512_vnni"


def test_a_set_that_does_not_exist_is_named(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a misspelled set makes an install without kernels in silence."""
    monkeypatch.setenv("QUIRE_KERNEL_SETS", "avx2,avx1024")
    with pytest.raises(CompileError, match=r"'avx2,avx1024'; give all, native, or names of amx, "):
        compile_kernels(tmp_path / "lib", sources=sources)


@pytest.mark.parametrize(("command", "reason"), [("c++ '", "No closing quotation"), ("{}", "run")])
def test_a_compiler_that_does_not_run_is_named(
    command: str, reason: str, sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when the install ends with a traceback."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", command.format(program))
    with pytest.raises(CompileError, match=reason):
        compile_kernels(tmp_path / "lib", sources=sources, isas=["avx2"])


def test_a_folder_that_cannot_be_written_is_told_before_compiling(
    sources: Path, tmp_path: Path
) -> None:
    """Turns red when the install ends there, or compiles for minutes first."""
    (tmp_path / "file").write_text("")
    (sources / "broken.cpp").write_text("this is not C++\n")
    with pytest.raises(CompileError, match=f"avx2: .*{tmp_path / 'file'}"):
        compile_kernels(tmp_path / "file" / "lib", sources=sources, isas=["avx2"])
    with pytest.raises(CompileError, match=f"avx2: .*{tmp_path / 'file'}"):
        compile_kernels(tmp_path / "file", sources=sources, isas=["avx2"])


def test_a_library_that_cannot_be_written_takes_no_other_with_it(
    sources: Path, tmp_path: Path
) -> None:
    """Turns red when a full disk ends the install, or when files stay that are no libraries."""
    output = tmp_path / "lib"
    occupied = output / "libquire_avx2.so" / "by a folder"
    occupied.mkdir(parents=True)
    with pytest.raises(CompileError, match=r"^avx2: .*libquire_avx2\.so") as caught:
        compile_kernels(output, sources=sources, isas=["avx512", "avx2"], keep_current=True)
    assert caught.value.libraries == (output / "libquire_avx512.so",)
    assert sorted(output.iterdir()) == [occupied.parent, *caught.value.libraries]


@pytest.mark.parametrize(
    ("free", "cpu_max", "memory_max", "jobs"),
    [
        (64, "max 100000", "max", 16),
        (64, "250000 100000", "max", 2),  # a job of a cluster
        (64, "250000 100000", "1.5", 1),
        (64, "max 100000", "8", 8),
        (3, "max 100000", "8", 3),
        (0, "50000 100000", "max", 1),
    ],
)
def test_compilers_at_once_fit_the_cores_and_the_memory(
    free: int,
    cpu_max: str,
    memory_max: str,
    jobs: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Turns red when a container of few cores or little memory compiles as its host would, so that
    the system kills compilers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    limit = memory_max if memory_max == "max" else str(int(float(memory_max) * GIB))
    mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {free * GIB // 1024} kB",
        "proc/self/cgroup": "0::/slurm/job_7",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/slurm/job_7/cpu.max": "max 100000",
        "sys/fs/cgroup/slurm/cpu.max": cpu_max,
        "sys/fs/cgroup/slurm/memory.max": limit,
    }
    lay_out(tmp_path, files)
    assert build.num_jobs(tmp_path) == jobs


def test_the_number_of_compilers_is_known_without_the_files_of_linux(tmp_path: Path) -> None:
    assert 1 <= build.num_jobs(tmp_path) <= (os.cpu_count() or 1)


def test_a_library_of_the_same_sources_is_kept(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when an install compiles what is there, keeps what is of other sources, or needs a
    compiler for nothing."""
    output, info = tmp_path / "lib", sources / "build_info.cpp"
    libraries = compile_kernels(output, sources=sources)

    def recompiled() -> list[bool]:
        before = [library.stat().st_mtime_ns for library in libraries]
        assert compile_kernels(output, sources=sources, keep_current=True) == libraries
        times = zip(libraries, before, strict=True)
        return [library.stat().st_mtime_ns > at for library, at in times]

    with monkeypatch.context() as without:
        without.setenv("CXX", "no-such-compiler")
        assert not any(recompiled())
        libraries[0].write_bytes(b"of other sources")
        with pytest.raises(CompileError, match=r"^amx: .*no-such-compiler") as caught:
            compile_kernels(output, sources=sources, keep_current=True)
        assert caught.value.libraries == libraries[1:]
        without.setenv("CXX", "none")
        with pytest.raises(CompileError, match="CXX=none") as caught:
            compile_kernels(output, sources=sources, keep_current=True)
        assert caught.value.libraries == ()
    assert recompiled() == [True, *[False] * (len(libraries) - 1)]
    info.write_text(info.read_text() + "// changed\n")
    assert all(recompiled())


def test_by_hand_what_is_missing_may_be_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when `--missing` compiles for minutes what is there."""
    kept: list[object] = []

    def compile_some(output: Path, **options: object) -> tuple[Path, ...]:
        kept.append(options["keep_current"])
        return ()

    monkeypatch.setattr("quire.ops.compile.__main__.compile_kernels", compile_some)
    assert [main(["--output", str(tmp_path), *more]) for more in ([], ["--missing"])] == [0, 0]
    assert kept == [False, True]


HOOK = """
import json, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

class BuildHookInterface:  # what the hook uses of hatchling, which is there only while pip builds
    def __class_getitem__(cls, item):
        return cls

for name in ("", ".builders", ".builders.hooks", ".builders.hooks.plugin"):
    sys.modules["hatchling" + name] = ModuleType("hatchling" + name)
interface = ModuleType("hatchling.builders.hooks.plugin.interface")
interface.BuildHookInterface = BuildHookInterface
sys.modules[interface.__name__] = interface
space = {"__name__": "hatch_build"}
exec(Path(sys.argv[1], "hatch_build.py").read_text(), space)
warnings = []
hook = space["KernelBuildHook"]()
hook.root, hook.target_name = sys.argv[1], "wheel"
hook.app = SimpleNamespace(display_info=lambda line: None, display_warning=warnings.append)
data = {"force_include": {}}
hook.initialize(sys.argv[2], data)
assert "torch" not in sys.modules and "quire" not in sys.modules
print(json.dumps([data, warnings]))
"""


def test_an_install_gets_the_sets_that_can_be_compiled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when one set that fails makes a wheel without kernels, when nobody is told which
    failed, or when installing quire needs what is installed only afterwards."""
    root = tmp_path / "checkout"
    ops = root / "src/quire/ops"
    platform = ("src/quire/base/platform/cgroups.py", "src/quire/base/platform/cpu.py")
    for name in ("hatch_build.py", "src/quire/ops/compile/build.py", *platform):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(sources, ops / "csrc")
    with (ops / "csrc" / "build_info.cpp").open("a") as source:
        source.write("#ifdef __AMX_TILE__\n#error here\n#endif\n")

    def install(version: str = "standard") -> tuple[dict[str, Any], list[str]]:
        command = [sys.executable, "-I", "-c", HOOK, str(root), version]
        run = subprocess.run(command, check=True, timeout=WAIT_S, capture_output=True)
        return tuple(json.loads(run.stdout))

    data, [warning] = install()
    made = [f"quire/ops/_lib/libquire_{isa.name}.so" for isa in ISAS if isa.name != "amx"]
    assert list(data["force_include"].values()) == made
    assert all((root / "src" / name).exists() for name in made)
    assert data["tag"].startswith("py3-none-") and not data["pure_python"]
    assert "some of its C++ kernels (amx: " in warning and "here" in warning
    assert install("editable")[0] == {"force_include": {}}
    monkeypatch.setenv("CXX", "none")
    data, [warning] = install()
    assert data == {"force_include": {}}
    assert "CXX=none" in warning and "python -m quire.ops.compile" in warning
