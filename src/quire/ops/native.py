"""Load the C++ kernels: one library per instruction set, on torch's own OpenMP runtime.

The libraries name OpenMP symbols without linking a runtime. They find them in the runtime that
torch has loaded, so that the process has one team of threads, of torch's size.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from quire.errors import EngineError
from quire.ops.compile import ISAS, Isa, build_hash, library_path
from quire.platform import Platform

__all__ = [
    "DTYPE_CODES",
    "NativeLibrary",
    "load_native",
    "mapped_openmp_runtimes",
    "native_unavailable",
]

# enum DType of csrc/simd.h
DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)

_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)[-.][^/]*$")
_log = logging.getLogger("quire.ops")

_POINTER, _INT64, _INT32, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
)
# Parameters of each function in csrc, in order.
_SIGNATURES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "paged_attention": (
            (_POINTER,) * 7 + (_INT64,) * 4 + (_INT32,) * 5 + (_FLOAT,) + (_INT32,) * 4
        ),
        "write_kv": (_POINTER,) * 5 + (_INT64,) * 4 + (_INT32,) * 3,
        "copy_blocks": (_POINTER, *(_INT64,) * 3, _POINTER, _POINTER, _INT64, _INT32),
        "rms_norm": (
            (_POINTER, _INT64, _INT64) * 2
            + (_POINTER,) * 3
            + (_INT64,) * 3
            + (_FLOAT,)
            + (_INT32,) * 3
        ),
        "silu_and_mul": (_POINTER, _INT64, _POINTER, _INT64, _INT64, _INT32, _INT32),
        "linear_pack": ((_POINTER,) * 2 + (_INT64,) * 2 + (_INT32,) * 2),
        "linear_rows": ((_POINTER,) * 3 + (_INT64,) * 3 + (_INT32,) * 2),
        "linear": ((_POINTER, _INT64) + (_POINTER,) * 3 + (_INT64,) * 3 + (_INT32,) * 3),
        "rope": ((_POINTER,) * 2 + (_INT64,) * 5 + (_POINTER,) * 3 + (_INT64,) * 2 + (_INT32,) * 3),
    }
)


class NativeLibrary:
    """The functions of one library. Every call releases the GIL."""

    def __init__(self, isa: str, library: ctypes.CDLL) -> None:
        self.isa = isa
        self._functions = {
            name: _declare(library, name, parameters) for name, parameters in _SIGNATURES.items()
        }

    def call(self, name: str, *arguments: object) -> None:
        """Call `quire_<name>`. Raises EngineError when it reports a failure."""
        code = self._functions[name](*arguments)
        if code != 0:
            raise EngineError(
                f"The {self.isa} kernel {name} failed with code {code} "
                "(1: element type it does not know, 2: no memory for scratch, 3: an index "
                "outside the table). "
                "Set QUIRE_CPU_ISA=none to run without these kernels."
            )


def native_unavailable(isa: str, platform: Platform) -> str | None:
    """Why the kernels of `isa` cannot run here, or None when they can."""
    entry = _isa(isa)
    if platform.device != "cpu":
        return f"tensors live on {platform.device}, these kernels compute on the CPU"
    if platform.cpu.architecture not in entry.architectures:
        return f"the processor is {platform.cpu.architecture}"
    missing = [name for name in entry.features if not platform.cpu.has(name)]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    loaded = _open(isa)
    return loaded if isinstance(loaded, str) else None


def load_native(isa: str) -> NativeLibrary:
    """The library of `isa`. Raises EngineError with the reason when it cannot be loaded."""
    loaded = _open(isa)
    if isinstance(loaded, str):
        raise EngineError(f"Kernels for {isa} cannot be loaded: {loaded}.")
    return loaded


def mapped_openmp_runtimes() -> tuple[str, ...]:
    """Paths of the OpenMP runtimes in this process; more than one fight for the cores."""
    try:
        lines = _MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()  # not Linux
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return tuple(sorted(path for path in paths if _OPENMP.search(path)))


def _isa(name: str) -> Isa:
    return next(isa for isa in ISAS if isa.name == name)


@cache
def _open(name: str) -> NativeLibrary | str:
    """The library, or why there is none. Cached: a process loads a library once."""
    isa = _isa(name)
    path = library_path(isa)
    rebuild = "run python -m quire.ops.compile"
    if not path.exists():
        return f"the kernels were not compiled at install; {rebuild}"
    problem = _share_openmp()
    if problem is not None:
        return problem
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} does not load ({error}); {rebuild}"
    library.quire_build_hash.restype = ctypes.c_char_p
    if library.quire_build_hash().decode() != build_hash(isa):
        reason = f"{path.name} was compiled from other sources; {rebuild}"
        _log.warning("plain torch instead of %s kernels: %s", name, reason)
        return reason
    return NativeLibrary(name, library)


@cache
def _share_openmp() -> str | None:
    """Make the symbols of the process's OpenMP runtime visible to our libraries; why not, if so."""
    runtime = next(iter(mapped_openmp_runtimes()), None) or ctypes.util.find_library("gomp")
    if runtime is None:
        return "there is no OpenMP runtime, neither torch's nor the system's; install libgomp"
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"the OpenMP runtime {runtime} does not load ({error})"
    return None


def _declare(library: ctypes.CDLL, name: str, parameters: tuple[type, ...]) -> Callable[..., int]:
    function = getattr(library, f"quire_{name}")
    function.argtypes = parameters
    function.restype = ctypes.c_int
    return function
