"""Compile the C++ kernels: one library per instruction set, chosen between at run time.

Used at install by `hatch_build.py`, which loads this file alone, and by hand through
`python -m quire.ops.compile`. Imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
]

SOURCE_FOLDER = Path(__file__).parents[1] / "csrc"
LIBRARY_FOLDER = Path(__file__).parents[1] / "_lib"

# Contraction is off because a value must not depend on how a template was instantiated.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",  # the compiler's own AVX-512 headers
    "-Wno-maybe-uninitialized",
)
_SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: compiler flags, and the processor features it needs (kernel's names)."""

    name: str
    architectures: tuple[str, ...]
    flags: tuple[str, ...]
    features: tuple[str, ...]


# Best first. A later set (AVX512_BF16, AMX, NEON) is a row here and a section in csrc/simd.h.
ISAS = (
    Isa(
        name="avx512",
        architectures=("x86_64", "AMD64"),
        flags=(
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-mprefer-vector-width=512",
        ),
        features=("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
    ),
    Isa(
        name="avx2",
        architectures=("x86_64", "AMD64"),
        flags=("-mavx2", "-mfma", "-mf16c"),
        features=("avx2", "fma", "f16c"),
    ),
)


class CompileError(Exception):
    """The kernels could not be compiled; the message is the reason on one line."""


def library_path(isa: Isa, folder: Path = LIBRARY_FOLDER) -> Path:
    """Where the library of an instruction set lives."""
    return folder / f"libquire_{isa.name}.so"


def build_hash(isa: Isa, sources: Path = SOURCE_FOLDER) -> str:
    """Digest of all sources and flags of `isa`. It is compiled into the library, so that a library
    built from other sources is told apart."""
    digest = hashlib.sha256(repr((_FLAGS, isa.flags)).encode())
    for path in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def compile_kernels(
    output: Path = LIBRARY_FOLDER,
    *,
    sources: Path = SOURCE_FOLDER,
    isas: Sequence[str] | None = None,
    sanitize: bool = False,
) -> tuple[Path, ...]:
    """Compile every instruction set of this architecture (or those named) into `output`.

    Returns the libraries. Raises CompileError when there is no compiler, no instruction set for
    this architecture, or the compiler fails; libraries that exist are then left as they were.
    """
    compiler = _compiler()
    wanted = [
        isa
        for isa in ISAS
        if platform.machine() in isa.architectures and (isas is None or isa.name in isas)
    ]
    if not wanted:
        raise CompileError(f"no kernels for {platform.machine()} ({isas or 'any instruction set'})")
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        built = [
            _compile_isa(compiler, isa, sources, Path(scratch), pool, sanitize) for isa in wanted
        ]
        done: list[Path] = []
        for isa, library in zip(wanted, built, strict=True):
            target = library_path(isa, output)
            # A new file under the old name: a process that has the old one mapped keeps it.
            staged = target.with_suffix(f".{os.getpid()}.tmp")
            shutil.copyfile(library, staged)
            os.replace(staged, target)
            done.append(target)
    return tuple(done)


def _compiler() -> str:
    named = os.environ.get("CXX")  # the build's own convention, not a setting of the engine
    for candidate in (named,) if named else ("c++", "g++", "clang++"):
        found = shutil.which(candidate)
        if found:
            return found
    raise CompileError(f"no C++ compiler ({named or 'c++, g++, clang++'}) on the path")


def _compile_isa(
    compiler: str,
    isa: Isa,
    sources: Path,
    scratch: Path,
    pool: ThreadPoolExecutor,
    sanitize: bool,
) -> Path:
    flags = [*_FLAGS, *isa.flags, f'-DQUIRE_BUILD_HASH="{build_hash(isa, sources)}"']
    flags += _SANITIZE_FLAGS if sanitize else ()
    units = sorted(sources.glob("*.cpp"))
    objects = [scratch / f"{isa.name}_{unit.stem}.o" for unit in units]
    commands = [
        [compiler, *flags, "-c", str(unit), "-o", str(target)]
        for unit, target in zip(units, objects, strict=True)
    ]
    list(pool.map(_call, commands))
    library = scratch / f"libquire_{isa.name}.so"
    # Linked without -fopenmp: the runtime is the one that torch brings (see native.py).
    link = [compiler, "-shared", *(_SANITIZE_FLAGS if sanitize else ()), "-o", str(library)]
    _call([*link, *map(str, objects)])
    return library


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        reason = (errors or result.stderr.splitlines() or ["no message"])[0].strip()
        raise CompileError(f"{Path(command[0]).name} failed: {reason}")
