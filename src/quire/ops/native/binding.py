"""Loads the C++ kernels: one library per instruction set. Never imports torch."""

from __future__ import annotations

import ctypes
import logging
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from quire.base.errors import EngineError
from quire.base.platform import Platform
from quire.ops.compile import ISAS, SOURCE_FOLDER, Isa, build_hash, library_path
from quire.ops.native.replay import KernelCall, NotCapturableError, kernel_error
from quire.ops.native.team import ALONE, Team

__all__ = [
    "NativeLibrary",
    "load_native",
    "native_unavailable",
    "read_signatures",
    "replay_function",
    "see_kernels",
]

_log = logging.getLogger("quire.ops")

_POINTER, _INT64, _INT32, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
)
_SLOTS = MappingProxyType({_POINTER: "Q", _INT64: "q", _INT32: "i4x", _FLOAT: "f4x"})
"""Formats of `struct` with which csrc/native/replay.h unpacks arguments: 8 bytes each."""

_TYPES: Mapping[str, type] = MappingProxyType(
    {"int64_t": _INT64, "int32_t": _INT32, "float": _FLOAT}
)
_EXPORT = re.compile(r"QUIRE_API int quire_(\w+)\(([^)]*),\s*quire::Team\*\s*(?:team)?\)\s*\{")


def read_signatures(source: str) -> dict[str, tuple[type, ...]]:
    """Return the parameters of each kernel that a C++ source exports, in order, without the team,
    which always comes last. They are stated once, where the kernel is defined.

    Raises EngineError for a type that ctypes would pass differently.
    """
    found: dict[str, tuple[type, ...]] = {}
    for name, listed in _EXPORT.findall(source):
        kinds: list[type] = []
        for parameter in listed.split(","):
            written = parameter.replace("*", " * ").split()[:-1]
            kind = _POINTER if "*" in written else _TYPES.get(" ".join(written))
            if kind is None:
                raise EngineError(
                    f"Kernel {name} has a parameter of an unknown type: {parameter.strip()!r}. "
                    f"Use a pointer or one of: {', '.join(_TYPES)}."
                )
            kinds.append(kind)
        found[name] = tuple(kinds)
    return found


@cache
def _signatures() -> Mapping[str, tuple[type, ...]]:
    sources = sorted(SOURCE_FOLDER.rglob("*.cpp"))
    found = (read_signatures(path.read_text(encoding="utf-8")) for path in sources)
    return MappingProxyType({name: kinds for each in found for name, kinds in each.items()})


class NativeLibrary:
    """The functions of one library, computed by one team. Every call releases the GIL."""

    def __init__(self, isa: str, library: ctypes.CDLL, team: Team) -> None:
        self.isa = isa
        self._library = library
        self._team = team
        self._team_handle = team.start(library)
        self._functions = _functions(library)

    def call(self, name: str, *arguments: object) -> None:
        """Call `quire_<name>`. Raises EngineError when it reports a failure."""
        if self._team.recorded is not None:
            self._team.recorded.append(self.record(name, arguments))
            if not self._team.computes:
                return
        code = self._functions[name](*arguments, self._team_handle)
        if code != 0:
            raise kernel_error(self.isa, name, code)

    def record(self, name: str, arguments: Sequence[object]) -> KernelCall:
        """Record a call of `quire_<name>` without making it. Raises NotCapturableError."""
        try:
            kernel = getattr(self._library, f"quire_{name}_replay")
        except AttributeError:
            raise NotCapturableError(f"kernel {name} cannot be replayed") from None
        layout = "=" + "".join(_SLOTS[kind] for kind in (*_signatures()[name], _POINTER))
        values = (0 if value is None else value for value in (*arguments, self._team_handle))
        address = ctypes.cast(kernel, ctypes.c_void_p).value
        assert address is not None
        try:
            return KernelCall(self.isa, name, address, struct.pack(layout, *values))
        except struct.error as error:
            raise NotCapturableError(f"kernel {name} was called with {error}") from None


def native_unavailable(isa: str, platform: Platform) -> str | None:
    """Return why the kernels of `isa` cannot run on this processor, or None if they can."""
    entry = _isa(isa)
    if platform.cpu.architecture not in entry.architectures:
        return f"the processor is {platform.cpu.architecture}"
    missing = [name for name in entry.all_features if not platform.cpu.has(name)]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    loaded = _open(isa)
    return loaded if isinstance(loaded, str) else None


def see_kernels(platform: Platform) -> Platform:
    """Return the platform with the kernels that were compiled and run on its processor."""
    problems = {isa.name: native_unavailable(isa.name, platform) for isa in ISAS}
    kernels = tuple(name for name, problem in problems.items() if problem is None)
    problem = None if kernels else problems[ISAS[-1].name]  # the set that most processors have
    return replace(platform, kernels=kernels, kernels_problem=problem)


def load_native(isa: str, team: Team = ALONE) -> NativeLibrary:
    """Return the library of `isa`. Raises EngineError with the reason if it cannot be loaded."""
    loaded = _open(isa)
    if isinstance(loaded, str):
        raise EngineError(f"Kernels for {isa} cannot be loaded: {loaded}.")
    return NativeLibrary(isa, loaded, team)


def replay_function(isa: str) -> Callable[..., int]:
    """Return `quire_replay` of the library of `isa`, which is loaded. It makes calls of any
    library."""
    library = _open(isa)
    assert not isinstance(library, str)
    replay = library.quire_replay
    replay.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    replay.restype = ctypes.c_int
    return replay


def _isa(name: str) -> Isa:
    return next(isa for isa in ISAS if isa.name == name)


@cache
def _open(name: str) -> ctypes.CDLL | str:
    """Return the library, or why there is none. Cached: a process loads a library once."""
    isa = _isa(name)
    path = library_path(isa)
    rebuild = "run python -m quire.ops.compile"
    if not path.exists():
        return f"the kernels were not compiled at install; {rebuild}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} does not load ({error}); {rebuild}"
    library.quire_build_hash.restype = ctypes.c_char_p
    if library.quire_build_hash().decode() != build_hash(isa):
        reason = f"{path.name} was compiled from other sources; {rebuild}"
        _log.warning("plain torch instead of %s kernels: %s", name, reason)
        return reason
    library.quire_unavailable.restype = ctypes.c_char_p
    refusal: bytes | None = library.quire_unavailable()
    if refusal is None:
        return library
    _log.warning("narrower kernels instead of %s: %s", name, refusal.decode())
    return refusal.decode()


@cache
def _functions(library: ctypes.CDLL) -> Mapping[str, Callable[..., int]]:
    """Return the kernels of a library by name. They take the team last, so that teams share
    them."""
    return MappingProxyType(
        {name: _declare(library, name, parameters) for name, parameters in _signatures().items()}
    )


def _declare(library: ctypes.CDLL, name: str, parameters: tuple[type, ...]) -> Callable[..., int]:
    function = getattr(library, f"quire_{name}")
    function.argtypes = (*parameters, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function
