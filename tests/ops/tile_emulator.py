"""Tile instructions (AMX) for the tests: the processor's own, or emulated (tile_emulator.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.ops.compile import ISAS, build
from quire.platform import detect_platform

__all__ = ["AMX", "build_emulator", "emulation", "missing"]

AMX = next(isa for isa in ISAS if isa.name == "amx")
SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = (*build._FLAGS, *AMX.all_flags)


def missing() -> str | None:
    """Why the library `amx` cannot run here, not even on emulated tiles, or None when it can."""
    cpu = detect_platform().cpu
    base = AMX.extends
    assert base is not None
    lacking = [feature for feature in base.all_features if not cpu.has(feature)]
    if lacking:
        return f"the processor lacks {', '.join(lacking)}"
    try:
        compiler = build._compiler()
    except build.CompileError as error:
        return str(error)
    return None if build._knows(compiler, AMX.all_flags) else f"{compiler} knows no tiles"


def build_emulator(folder: Path) -> Path:
    """Compile it into `folder`."""
    target = folder / "tile_emulator.so"
    command = [build._compiler(), "-shared", *_FLAGS, str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return target


@contextmanager
def emulation(library: Path) -> Iterator[ctypes.CDLL]:
    """In force inside the block, for all threads, unless the processor has the instructions."""
    emulator = ctypes.CDLL(str(library))
    emulator.emulator_count.restype = ctypes.c_int64
    if detect_platform().cpu.has(*AMX.features):
        yield emulator
        return
    emulator.emulator_install()
    try:
        yield emulator
    finally:
        emulator.emulator_remove()
