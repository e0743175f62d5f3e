"""Compiles the C++ kernels into one library per instruction set; one of them is chosen at run time.

`python -m quire.ops.compile` uses it by hand, `hatch_build.py` at installation. Then no package is
there yet: it imports the standard library, and two files that the hook loads before.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.base.platform.cgroups import read_group_limits
from quire.base.platform.cpu import detect_cpu

__all__ = [
    "ISAS",
    "LIBRARY_FOLDER",
    "SOURCE_FOLDER",
    "CompileError",
    "Isa",
    "build_hash",
    "compile_kernels",
    "find_compiler",
    "library_path",
    "maker",
    "num_jobs",
]

SOURCE_FOLDER = Path(__file__).parents[1] / "csrc"
LIBRARY_FOLDER = Path(__file__).parents[1] / "_lib"
_BUILD_INFO = "build_info"  # the source file with the hash, one for each library
_JOB_BYTES = 1 << 30  # memory of a compiler: twice what g++ 12 takes for the largest source

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
    sources in `units` (file names without ending) are compiled again. Such a set is left out if the
    compiler does not know its flags, or the assembler not its `instruction`.
    """

    name: str
    architectures: tuple[str, ...]
    flags: tuple[str, ...]
    features: tuple[str, ...]
    extends: Isa | None = None
    units: tuple[str, ...] = ()
    instruction: str = ""

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
    instruction="vpdpbusd %zmm0, %zmm0, %zmm0",
)
_AVX512_BF16 = Isa(
    "avx512_bf16",
    _X86,
    ("-mavx512bf16",),
    ("avx512_bf16",),
    extends=_AVX512_VNNI,
    units=(
        *("linear_bf16", "norms", "paged_attention", "pointwise", "rope_and_write_kv"),
        "write_latent",
    ),
    instruction="vdpbf16ps %zmm0, %zmm0, %zmm0",
)
_AMX = Isa(
    "amx",
    _X86,
    ("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ("amx_tile", "amx_bf16", "amx_int8"),
    extends=_AVX512_BF16,
    units=("linear_bf16", "linear_int8", "linear_int4", "paged_attention", "processor"),
    instruction="tdpbf16ps %tmm2, %tmm1, %tmm0",
)

# Best first. A new set (NEON) is a row here and, for another width, a section in simd.h.
ISAS = (_AMX, _AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2)


class CompileError(Exception):
    """Kernels could not be compiled; the message is the reason on one line.

    libraries: libraries that are in place all the same, best first.
    """

    def __init__(self, message: str, libraries: tuple[Path, ...] = ()) -> None:
        super().__init__(message)
        self.libraries = libraries


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
    the libraries, the best one first. Sets that compiler or assembler do not know are left out.
    Where none are named, `QUIRE_KERNEL_SETS` may choose: "all", "native" (those that this processor
    runs), or names with commas between them.

    keep_current: keep a library that was made from these sources, for which no compiler is needed;
    does not apply to sanitized ones. report: receives a line for each set, narrowest set first.

    Raises CompileError if there are no kernels for this architecture, if `CXX` is "none", if
    `QUIRE_KERNEL_SETS` names no sets, and, with all others in place, if a set cannot be compiled.
    Its old library stays. Where a run is interrupted, the next one goes on.
    """
    if os.environ.get("CXX") == "none":
        raise CompileError("CXX=none leaves them out")
    if isas is None:
        isas = _chosen_sets()
    wanted = [
        isa
        for isa in ISAS
        if platform.machine() in isa.architectures and (isas is None or isa.name in isas)
    ]
    if not wanted:
        raise CompileError(f"no kernels for {platform.machine()} ({isas or 'any instruction set'})")
    missing, unknown, failed = wanted, dict[Isa, str](), dict[Isa, str]()
    try:
        if keep_current:
            missing = [isa for isa in wanted if not _is_current(isa, sources, output)]
        if missing:
            compiler = find_compiler()
            unknown = _unknown(compiler, missing, report)
            known = [isa for isa in missing if isa not in unknown]
            if known:
                failed = _compile(compiler, known, output, sources, sanitize, report)
    except (CompileError, OSError) as error:
        failed = dict.fromkeys(missing, str(error))
    absent = {**unknown, **failed}
    libraries = tuple(library_path(isa, output) for isa in wanted if isa not in absent)
    if failed or not libraries:
        raise CompileError(_reasons(failed or unknown), libraries)
    return libraries


def _chosen_sets() -> tuple[str, ...] | None:
    """Return the names of the sets that `QUIRE_KERNEL_SETS` chooses, or None for all."""
    choice = os.environ.get("QUIRE_KERNEL_SETS", "").strip()  # of the build too, as `CXX` is
    if choice in ("", "all"):
        return None
    known = tuple(isa.name for isa in ISAS)
    if choice == "native":
        cpu = detect_cpu()
        return tuple(isa.name for isa in ISAS if cpu.has(*isa.all_features))
    names = tuple(name.strip() for name in choice.split(","))
    if not set(names) <= set(known):
        raise CompileError(
            f"QUIRE_KERNEL_SETS is {choice!r}; give all, native, or names of {', '.join(known)}"
        )
    return names


def num_jobs(root: Path = Path("/")) -> int:
    """Return how many compilers may run at once: one for each core of this process, as far as free
    memory reaches. Limits of control groups count. root: the folder in which /proc and /sys lie."""
    affinity = getattr(os, "sched_getaffinity", None)
    limits = read_group_limits(root)
    most: list[float] = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    if limits.cores is not None:
        most.append(limits.cores)
    if limits.free_bytes is not None:
        most.append(limits.free_bytes / _JOB_BYTES)
    try:
        memory = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        memory = ""  # not Linux, or hidden
    most += [int(kib) * 1024 / _JOB_BYTES for kib in re.findall(r"MemAvailable: *(\d+)", memory)]
    return max(1, int(min(most)))


def _compile(
    compiler: Sequence[str],
    isas: Sequence[Isa],
    output: Path,
    sources: Path,
    sanitize: bool,
    report: Callable[[str], None],
) -> dict[Isa, str]:
    """Put the library of each set in place. Returns the reasons of those that fail. Raises OSError
    if the folder cannot be written, before anything is compiled."""
    failed: dict[Isa, str] = {}
    output.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(dir=output) as staging,
        TemporaryDirectory() as scratch,
        ThreadPoolExecutor(num_jobs()) as pool,
    ):
        build = _Build(compiler, sources, Path(scratch), pool, sanitize)
        try:
            objects = build.start(isas[::-1])
            for number, isa in enumerate(objects, 1):
                try:
                    made = build.link(isa, objects[isa])
                    _place(made, Path(staging), library_path(isa, output))
                except CompileError as error:
                    failed[isa] = str(error)
                    report(f"no kernels for {isa.name}: {error}")
                else:
                    report(f"compiled the kernels for {isa.name} ({number} of {len(isas)})")
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def _place(library: Path, staging: Path, target: Path) -> None:
    """Put a new file under the old name: a process that maps the old one keeps it. staging: a
    folder on the same disk. Raises CompileError."""
    try:
        os.replace(shutil.copyfile(library, staging / library.name), target)
    except OSError as error:
        raise CompileError(f"{target} cannot be written: {error.strerror}") from None


def _reasons(failed: Mapping[Isa, str]) -> str:
    """Return one line: the sets that have a reason, then the reason."""
    names: dict[str, list[str]] = {}
    for isa, reason in failed.items():
        names.setdefault(reason, []).append(isa.name)
    return "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())


def _is_current(isa: Isa, sources: Path, output: Path) -> bool:
    library, digest = library_path(isa, output), build_hash(isa, sources).encode()
    try:
        return digest in library.read_bytes()
    except OSError:
        return False  # there is none, or nobody can load it


def _unknown(
    compiler: Sequence[str], isas: Sequence[Isa], report: Callable[[str], None]
) -> dict[Isa, str]:
    """Return the sets that cannot be compiled here, with the reason."""
    reason = f"{Path(compiler[0]).name} or its assembler does not know the instructions"
    unknown = [isa for isa in isas if isa.extends is not None and not _knows(compiler, isa)]
    for isa in unknown:
        report(f"no kernels for {isa.name}: {reason}")
    return dict.fromkeys(unknown, reason)


def _knows(compiler: Sequence[str], isa: Isa) -> bool:
    """Return True if an instruction becomes an object: assemblers may be older than compilers."""
    with TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.cpp")
        source.write_text(f'void probe() {{ asm("{isa.instruction}"); }}\n', encoding="utf-8")
        target = str(source.with_suffix(".o"))
        try:
            _call([*compiler, *isa.all_flags, "-c", "-o", target, str(source)])
        except CompileError:
            return False
    return True


def find_compiler() -> tuple[str, ...]:
    """Return the words with which the compiler's commands begin. `CXX` may be a path, or a command
    with arguments such as "ccache g++". Raises CompileError if there is none, or it is "none"."""
    named = os.environ.get("CXX", "")  # the build's own convention, not a setting of the engine
    if named == "none":
        raise CompileError("CXX=none leaves them out")
    try:
        words = [named] if shutil.which(named) else shlex.split(named)
    except ValueError as error:
        raise CompileError(f"CXX is {named!r}: {error}") from None
    for first, *arguments in [words] if words else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(first)
        if found:
            return (found, *arguments)
    raise CompileError(f"no C++ compiler ({named or 'c++, g++, clang++'}) on the path")


@dataclass(frozen=True, slots=True)
class _Build:
    """One run of the compiler over some instruction sets. Objects that two sets share are made
    once."""

    compiler: Sequence[str]
    sources: Path
    scratch: Path
    pool: ThreadPoolExecutor
    sanitize: bool

    def start(self, isas: Sequence[Isa]) -> dict[Isa, dict[Path, Future[None]]]:
        """Begin to compile, and return the objects of each set. Those of the next set are compiled
        meanwhile, so that no core waits for the longest of a set."""
        commands = {isa: self._objects(isa) for isa in isas}
        begun: dict[Path, Future[None]] = {}
        for each in commands.values():
            for target in sorted(each, key=lambda target: _longest_first(each[target])):
                if target not in begun:
                    begun[target] = self.pool.submit(_call, each[target])
        return {isa: {target: begun[target] for target in each} for isa, each in commands.items()}

    def link(self, isa: Isa, objects: Mapping[Path, Future[None]]) -> Path:
        """Return the library of a set, linked when its objects are there. Raises CompileError."""
        for compiled in objects.values():
            compiled.result()
        library = self.scratch / f"libquire_{isa.name}.so"
        link = [*self.compiler, "-shared", "-pthread", *(_SANITIZE_FLAGS if self.sanitize else ())]
        _call([*link, "-o", str(library), *map(str, objects)])
        return library

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
            found[target] = [*self.compiler, *given]
        return found


def _longest_first(command: Sequence[str]) -> int:
    """Return a sort key of a command: the largest sources take longest and must begin first."""
    return -Path(command[-1]).stat().st_size


def maker(isa: Isa, unit: str) -> Isa:
    """Return the set whose object of this source (without its ending) serves `isa`."""
    return isa if isa.extends is None or unit in isa.units else maker(isa.extends, unit)


def _call(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise CompileError(f"{name} does not run: {error}") from None
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        reason = (errors or result.stderr.splitlines() or [f"status {result.returncode}"])[0]
        raise CompileError(f"{name} failed: {reason.strip()}")
