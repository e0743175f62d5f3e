"""Compiles the C++ kernels into one library per instruction set; one of them is chosen at run time.

`hatch_build.py` uses it at installation and loads this file alone; `python -m quire.ops.compile`
uses it by hand. It imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = [
    "ISAS",
    "LIBRARY_FOLDER",
    "SOURCE_FOLDER",
    "CompileError",
    "Isa",
    "build_hash",
    "compile_kernels",
    "library_path",
    "maker",
]

SOURCE_FOLDER = Path(__file__).parents[1] / "csrc"
LIBRARY_FOLDER = Path(__file__).parents[1] / "_lib"
_BUILD_INFO = "build_info"  # the source file with the hash, one for each library

# Contraction is off, so that values do not depend on how a template was instantiated.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",  # the compiler's own AVX-512 headers
    "-Wno-maybe-uninitialized",
)
# -O0: instrumented templates take two and a half times as long to compile at -O1.
_SANITIZE_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-g1",
    "-O0",
    "-DQUIRE_SANITIZED",
)


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: compiler flags, and the processor features that it needs (the kernel's
    names).

    extends: a narrower set that this one widens. Its flags and features come first, and only the
    sources in `units` (file names without ending) are compiled again. Such a set is skipped if the
    compiler does not know its flags.
    """

    name: str
    architectures: tuple[str, ...]
    flags: tuple[str, ...]
    features: tuple[str, ...]
    extends: Isa | None = None
    units: tuple[str, ...] = ()

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*(self.extends.all_flags if self.extends else ()), *self.flags)

    @property
    def all_features(self) -> tuple[str, ...]:
        return (*(self.extends.all_features if self.extends else ()), *self.features)


_X86 = ("x86_64", "AMD64")
_AVX2 = Isa("avx2", _X86, ("-mavx2", "-mfma", "-mf16c"), ("avx2", "fma", "f16c"))
_AVX512 = Isa(
    "avx512",
    _X86,
    (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ),
    ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
)
_AVX512_VNNI = Isa(
    "avx512_vnni",
    _X86,
    ("-mavx512vnni",),
    ("avx512_vnni",),
    extends=_AVX512,
    units=("linear_int8", "linear_int4", "linear_blocks", "paged_attention"),
)
_AVX512_BF16 = Isa(
    "avx512_bf16",
    _X86,
    ("-mavx512bf16",),
    ("avx512_bf16",),
    extends=_AVX512_VNNI,
    units=("linear_bf16", "norms", "paged_attention", "pointwise", "rope_and_write_kv"),
)
_AMX = Isa(
    "amx",
    _X86,
    ("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ("amx_tile", "amx_bf16", "amx_int8"),
    extends=_AVX512_BF16,
    units=("linear_bf16", "linear_int8", "linear_int4", "paged_attention", "processor"),
)

# Best first. A new set (NEON) is a row here and, for another width, a section in simd.h.
ISAS = (_AMX, _AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2)


class CompileError(Exception):
    """The kernels could not be compiled; the message is the reason on one line."""


def library_path(isa: Isa, folder: Path = LIBRARY_FOLDER) -> Path:
    """Return the path of an instruction set's library."""
    return folder / f"libquire_{isa.name}.so"


def build_hash(isa: Isa, sources: Path = SOURCE_FOLDER) -> str:
    """Return a digest of all sources and of the row of `isa`. It is compiled into the library, and
    shows whether a library was made from other sources."""
    digest = hashlib.sha256(repr((_FLAGS, isa)).encode())
    for path in sorted([*sources.rglob("*.h"), *sources.rglob("*.cpp")]):
        name = path.relative_to(sources).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def compile_kernels(
    output: Path = LIBRARY_FOLDER,
    *,
    sources: Path = SOURCE_FOLDER,
    isas: Sequence[str] | None = None,
    sanitize: bool = False,
    keep_current: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Path, ...]:
    """Compile every instruction set of this architecture (or those named) into `output`, and return
    the libraries, the best one first.

    keep_current: keep a library that was made from these sources; does not apply to sanitized ones.
    report: receives a line for each library in place, narrowest set first, so that an interrupted
    run continues from there. Raises CompileError when there is no compiler, no instruction set for
    this architecture, or the compiler fails, which leaves the other libraries as they are.
    """
    compiler = _compiler()
    wanted = [
        isa
        for isa in ISAS
        if platform.machine() in isa.architectures
        and (isas is None or isa.name in isas)
        and (isa.extends is None or _knows(compiler, isa.all_flags))
    ]
    if not wanted:
        raise CompileError(f"no kernels for {platform.machine()} ({isas or 'any instruction set'})")
    output.mkdir(parents=True, exist_ok=True)
    libraries = tuple(library_path(isa, output) for isa in wanted)
    if keep_current:
        wanted = [isa for isa in wanted if not _is_current(isa, sources, output)]
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        build = _Build(compiler, sources, Path(scratch), pool, sanitize)
        for number, (isa, library) in enumerate(build.libraries(wanted[::-1]), 1):
            target = library_path(isa, output)
            # A new file under the old name: a process that maps the old one keeps it.
            staged = target.with_suffix(f".{os.getpid()}.tmp")
            shutil.copyfile(library, staged)
            os.replace(staged, target)
            report(f"compiled the kernels for {isa.name} ({number} of {len(wanted)})")
    return libraries


def _is_current(isa: Isa, sources: Path, output: Path) -> bool:
    library = library_path(isa, output)
    return library.exists() and build_hash(isa, sources).encode() in library.read_bytes()


def _knows(compiler: str, flags: Sequence[str]) -> bool:
    command = [compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> str:
    named = os.environ.get("CXX")  # the build's own convention, not a setting of the engine
    for candidate in (named,) if named else ("c++", "g++", "clang++"):
        found = shutil.which(candidate)
        if found:
            return found
    raise CompileError(f"no C++ compiler ({named or 'c++, g++, clang++'}) on the path")


@dataclass(frozen=True, slots=True)
class _Build:
    """One run of the compiler over some instruction sets. Objects that two sets share are made
    once."""

    compiler: str
    sources: Path
    scratch: Path
    pool: ThreadPoolExecutor
    sanitize: bool

    def libraries(self, isas: Sequence[Isa]) -> Iterator[tuple[Isa, Path]]:
        """Yield the library of each set. The objects of the next set are compiled meanwhile, so
        that no core waits for the longest of a set."""
        objects = {isa: self._objects(isa) for isa in isas}
        compiled: dict[Path, Future[None]] = {}
        for each in objects.values():
            for target in sorted(each, key=lambda target: _longest_first(each[target])):
                if target not in compiled:
                    compiled[target] = self.pool.submit(_call, each[target])
        try:
            for isa, each in objects.items():
                for target in each:
                    compiled[target].result()
                yield isa, self._link(isa, list(each))
        finally:
            self.pool.shutdown(cancel_futures=True)

    def _objects(self, isa: Isa) -> dict[Path, list[str]]:
        """Return the command of each object of a library. Two sets that share an object have the
        same command."""
        found: dict[Path, list[str]] = {}
        for unit in sorted(self.sources.rglob("*.cpp")):
            is_info = unit.stem == _BUILD_INFO
            made_by = isa if is_info else maker(isa, unit.stem)
            target = self.scratch / f"{made_by.name}_{unit.stem}.o"
            flags = [*_FLAGS, *(_SANITIZE_FLAGS if self.sanitize else ())]
            if is_info:
                flags.append(f'-DQUIRE_BUILD_HASH="{build_hash(isa, self.sources)}"')
            flags += ["-I", str(self.sources), *made_by.all_flags]
            given = [*flags, "-c", "-o", str(target), str(unit)]
            found[target] = [self.compiler, *given]
        return found

    def _link(self, isa: Isa, objects: Sequence[Path]) -> Path:
        library = self.scratch / f"libquire_{isa.name}.so"
        link = [self.compiler, "-shared", "-pthread", *(_SANITIZE_FLAGS if self.sanitize else ())]
        _call([*link, "-o", str(library), *map(str, objects)])
        return library


def _longest_first(command: Sequence[str]) -> int:
    """Return a sort key of a command: the largest sources take longest and must begin first."""
    return -Path(command[-1]).stat().st_size


def maker(isa: Isa, unit: str) -> Isa:
    """Return the set whose object of this source (without its ending) serves `isa`."""
    return isa if isa.extends is None or unit in isa.units else maker(isa.extends, unit)


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        reason = (errors or result.stderr.splitlines() or ["no message"])[0].strip()
        raise CompileError(f"{Path(command[0]).name} failed: {reason}")
