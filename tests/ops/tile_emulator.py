"""Tile instructions (AMX) for the tests: the processor's own, or emulated (tile_emulator.cpp)."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Op, Provider, Team
from quire.ops.attention.paged_attention import cpu as paged_attention
from quire.ops.compile import ISAS, build, library_path
from quire.ops.linear.int4 import cpu as linear_int4
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int8 import cpu as linear_int8
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.linear.plain import cpu as linear
from quire.ops.native import binding as native
from quire.ops.native.team import ALONE
from quire.ops.random_tensors import normal

__all__ = [
    "AMX",
    "TILE_ATTENTION",
    "TILE_OPS",
    "Arguments",
    "build_emulator",
    "emulation",
    "has_tiles",
    "tile_provider",
    "tile_weights",
    "tiles_unavailable",
]

LINEAR_BINDINGS = {
    "linear": linear.bind,
    "linear_int8": linear_int8.bind,
    "linear_int4": linear_int4.bind,
}
BINDINGS = {**LINEAR_BINDINGS, "paged_attention": paged_attention.bind}
TILE_OPS = tuple(ALL_OPS[name] for name in LINEAR_BINDINGS)
TILE_ATTENTION = ALL_OPS["paged_attention"]
Arguments = tuple[torch.Tensor | None, ...]
AMX = next(isa for isa in ISAS if isa.name == "amx")
SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = (*build._FLAGS, *AMX.all_flags)


def tiles_unavailable() -> str | None:
    """Why the library `amx` cannot run here, not even on emulated tiles, or None when it can."""
    cpu = detect_platform().cpu
    base = AMX.extends
    assert base is not None
    lacking = [feature for feature in base.all_features if not cpu.has(feature)]
    if lacking:
        return f"the processor lacks {', '.join(lacking)}"
    try:
        compiler = build.find_compiler()
    except build.CompileError as error:
        return str(error)
    return None if build._knows(compiler, AMX) else f"{compiler[0]} knows no tiles"


def has_tiles() -> bool:
    """Return whether the processor itself has tiles."""
    return detect_platform().cpu.has(*AMX.features)


def tile_provider(op: Op, library: Path = library_path(AMX)) -> Provider:  # noqa: B008  a constant
    """The provider on tiles, without the question whether the processor has them."""
    provider = op.provider("cpu_amx")
    assert provider is not None
    load = partial(_load, BINDINGS[op.name], library)
    return replace(provider, unavailable=lambda platform: None, load=load)


def tile_weights(op: Op, generator: torch.Generator, outputs: int, depth: int) -> Arguments:
    """Arguments of `op` with, in 4 bits, zero points and groups of 32."""
    if op.name == "linear":
        return (normal(generator, outputs, depth, dtype=torch.bfloat16),)
    if op.name == "linear_int8":
        return int8_weight(generator, outputs, depth)
    return int4_weight(generator, outputs, depth, 32)


def _load(
    bind: Callable[[native.NativeLibrary], Callable[..., Any]], library: Path, team: Team = ALONE
) -> Callable[..., Any]:
    return bind(native.NativeLibrary(AMX.name, ctypes.CDLL(str(library)), team))


def build_emulator(folder: Path) -> Path:
    """Compile it into `folder`."""
    target = folder / "tile_emulator.so"
    command = [*build.find_compiler(), "-shared", *_FLAGS, str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True, timeout=600)
    return target


@contextmanager
def emulation(library: Path) -> Iterator[ctypes.CDLL]:
    """In force inside the block, for all threads, unless the processor has the instructions."""
    emulator = ctypes.CDLL(str(library))
    emulator.emulator_count.restype = ctypes.c_int64
    if has_tiles():
        assert native.native_unavailable(AMX.name, detect_platform()) is None
        yield emulator
        return
    emulator.emulator_install()
    try:
        yield emulator
    finally:
        emulator.emulator_remove()
